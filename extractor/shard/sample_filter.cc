#include "extractor/shard/sample_filter.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "extractor/base/json.h"

namespace statetap {
namespace {

using Value = std::variant<std::string, double, bool>;
enum class Relation { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kIn };

constexpr int kMaxDepth = 100;

enum class FieldKind { kText, kNumber, kBool };
struct Field {
  std::string_view name;
  FieldKind kind;
  std::optional<Value> (*read)(const SampleFacts&);
};

std::optional<Value> Text(std::string_view text) { return Value(std::string(text)); }
std::optional<Value> Number(int64_t number) { return Value(static_cast<double>(number)); }

constexpr std::array kFields = {
    Field{"id", FieldKind::kText, [](const SampleFacts& s) { return Text(s.id); }},
    Field{"source", FieldKind::kText, [](const SampleFacts& s) { return Text(s.source); }},
    Field{"split", FieldKind::kText, [](const SampleFacts& s) { return Text(s.split); }},
    Field{"finish", FieldKind::kText, [](const SampleFacts& s) { return Text(s.finish); }},
    Field{"index", FieldKind::kNumber, [](const SampleFacts& s) { return Number(s.index); }},
    Field{"prompt_tokens", FieldKind::kNumber,
          [](const SampleFacts& s) { return Number(s.prompt_tokens); }},
    Field{"tokens", FieldKind::kNumber, [](const SampleFacts& s) { return Number(s.tokens); }},
    Field{"supervised_tokens", FieldKind::kNumber,
          [](const SampleFacts& s) { return Number(s.supervised_tokens); }},
    Field{"generated_tokens", FieldKind::kNumber,
          [](const SampleFacts& s) { return Number(s.generated_tokens); }},
    Field{"logprob", FieldKind::kNumber,
          [](const SampleFacts& s) {
            return s.logprob ? std::optional<Value>(*s.logprob) : std::nullopt;
          }},
    Field{"truncated", FieldKind::kBool,
          [](const SampleFacts& s) { return std::optional<Value>(s.truncated); }},
};

bool Compare(const Value& left, Relation relation, const Value& right) {
  if (left.index() != right.index()) return false;
  switch (relation) {
    case Relation::kEqual:
    case Relation::kIn: return left == right;
    case Relation::kNotEqual: return left != right;
    case Relation::kLess: return left < right;
    case Relation::kLessEqual: return left <= right;
    case Relation::kGreater: return left > right;
    case Relation::kGreaterEqual: return left >= right;
  }
  return false;
}

}  // namespace

// `all`: children all hold; `any`: one does; `none`: the only child does not; else a comparison.
struct SampleFilter::Node {
  enum class Kind { kAll, kAny, kNone, kCompare };
  Kind kind = Kind::kCompare;
  std::vector<Node> children;
  const Field* field = nullptr;  // null: meta[meta_name]
  std::string meta_name;
  Relation relation = Relation::kEqual;
  std::vector<Value> values;  // one, but for kIn
};

namespace {

using Node = SampleFilter::Node;

// Recursive descent over the text itself; `at_` is the next byte.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  absl::StatusOr<Node> ParseAll() {
    STATETAP_ASSIGN_OR_RETURN(Node node, ParseAny(0));
    SkipSpace();
    if (at_ != text_.size()) return Wanted("and, or, or the end");
    return node;
  }

 private:
  void SkipSpace() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  static bool IsWordByte(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }
  std::string_view PeekWord() {
    SkipSpace();
    size_t end = at_;
    while (end < text_.size() && IsWordByte(text_[end])) ++end;
    return text_.substr(at_, end - at_);
  }
  bool TakeWord(std::string_view word) {
    if (PeekWord() != word) return false;
    at_ += word.size();
    return true;
  }
  bool Take(std::string_view symbol) {
    SkipSpace();
    if (!text_.substr(at_).starts_with(symbol)) return false;
    at_ += symbol.size();
    return true;
  }
  absl::Status Wanted(std::string_view what) {
    SkipSpace();
    return absl::InvalidArgumentError(
        fmt::format("where: at character {}, before \"{}\": {} is wanted here", at_ + 1,
                    text_.substr(at_, 20), what));
  }

  absl::StatusOr<Node> ParseAny(int depth) {
    return ParseList(depth, "or", Node::Kind::kAny, &Parser::ParseEvery);
  }
  absl::StatusOr<Node> ParseEvery(int depth) {
    return ParseList(depth, "and", Node::Kind::kAll, &Parser::ParseNot);
  }
  absl::StatusOr<Node> ParseList(int depth, std::string_view word, Node::Kind kind,
                                 absl::StatusOr<Node> (Parser::*part)(int)) {
    if (depth > kMaxDepth) return Wanted("an expression of fewer levels");
    Node list;
    list.kind = kind;
    do {
      STATETAP_ASSIGN_OR_RETURN(Node node, (this->*part)(depth + 1));
      list.children.push_back(std::move(node));
    } while (TakeWord(word));
    if (list.children.size() > 1) return list;
    Node only = std::move(list.children.front());
    return only;
  }
  absl::StatusOr<Node> ParseNot(int depth) {
    if (depth > kMaxDepth) return Wanted("an expression of fewer levels");
    if (TakeWord("not")) {
      STATETAP_ASSIGN_OR_RETURN(Node inner, ParseNot(depth + 1));
      return Negated(std::move(inner));
    }
    if (!Take("(")) return ParseComparison();
    STATETAP_ASSIGN_OR_RETURN(Node inner, ParseAny(depth + 1));
    if (!Take(")")) return Wanted("and, or, or a closing parenthesis");
    return inner;
  }
  static Node Negated(Node inner) {
    Node node;
    node.kind = Node::Kind::kNone;
    node.children.push_back(std::move(inner));
    return node;
  }

  absl::StatusOr<Node> ParseComparison() {
    Node node;
    STATETAP_RETURN_IF_ERROR(ParseField(node));
    if (node.field != nullptr && node.field->kind == FieldKind::kBool) {
      const size_t before = at_;
      if (!ParseRelation(node)) {  // `truncated` alone
        at_ = before;
        node.values.emplace_back(true);
        return node;
      }
    } else if (TakeWord("not")) {
      if (!TakeWord("in")) return Wanted("in");
      node.relation = Relation::kIn;
      STATETAP_RETURN_IF_ERROR(ParseValues(node));
      return Negated(std::move(node));
    } else if (!ParseRelation(node)) {
      return Wanted("a comparison (== != < <= > >= in)");
    }
    STATETAP_RETURN_IF_ERROR(ParseValues(node));
    return node;
  }
  absl::Status ParseField(Node& node) {
    const std::string_view word = PeekWord();
    if (word == "meta") {
      at_ += word.size();
      if (!Take(".")) return Wanted("a name as in meta.lang");
      SkipSpace();
      if (at_ < text_.size() && (text_[at_] == '"' || text_[at_] == '\'')) {
        STATETAP_ASSIGN_OR_RETURN(node.meta_name, ParseString());
        return absl::OkStatus();
      }
      node.meta_name = std::string(PeekWord());
      at_ += node.meta_name.size();
      return node.meta_name.empty() ? Wanted("a name as in meta.lang") : absl::OkStatus();
    }
    const auto found = std::find_if(kFields.begin(), kFields.end(),
                                    [&](const Field& field) { return field.name == word; });
    if (found == kFields.end()) {
      std::string names;
      for (const Field& field : kFields) names += fmt::format("{}, ", field.name);
      return Wanted(fmt::format("a field ({}meta.NAME)", names));
    }
    at_ += word.size();
    node.field = &*found;
    return absl::OkStatus();
  }
  bool ParseRelation(Node& node) {
    constexpr std::pair<std::string_view, Relation> kSymbols[] = {
        {"==", Relation::kEqual},        {"!=", Relation::kNotEqual}, {"<=", Relation::kLessEqual},
        {">=", Relation::kGreaterEqual}, {"<", Relation::kLess},      {">", Relation::kGreater}};
    for (const auto& [symbol, relation] : kSymbols) {
      if (!Take(symbol)) continue;
      node.relation = relation;
      return true;
    }
    if (!TakeWord("in")) return false;
    node.relation = Relation::kIn;
    return true;
  }
  absl::Status ParseValues(Node& node) {
    if (node.relation != Relation::kIn) return ParseValue(node);
    if (!Take("(")) return Wanted("a list as in (\"a\", \"b\")");
    do {
      STATETAP_RETURN_IF_ERROR(ParseValue(node));
    } while (Take(","));
    return Take(")") ? absl::OkStatus() : Wanted("a comma or a closing parenthesis");
  }
  absl::Status ParseValue(Node& node) {
    SkipSpace();
    const size_t begin = at_;
    STATETAP_ASSIGN_OR_RETURN(Value value, ParseAnyValue());
    const auto wanted = [&](std::string_view what) {
      at_ = begin;
      return Wanted(what);
    };
    if (node.field != nullptr) {
      constexpr std::string_view kKinds[] = {"text in quotes", "a number", "true or false"};
      const auto kind = static_cast<size_t>(node.field->kind);
      if (value.index() != kind)
        return wanted(fmt::format("{} to compare {} with", kKinds[kind], node.field->name));
    }
    const bool ordered = node.relation != Relation::kEqual &&
                         node.relation != Relation::kNotEqual && node.relation != Relation::kIn;
    if (ordered && std::holds_alternative<bool>(value))
      return wanted("a value with an order (true and false have == and != only)");
    node.values.push_back(std::move(value));
    return absl::OkStatus();
  }
  absl::StatusOr<Value> ParseAnyValue() {
    if (at_ < text_.size() && (text_[at_] == '"' || text_[at_] == '\'')) {
      STATETAP_ASSIGN_OR_RETURN(std::string text, ParseString());
      return Value(std::move(text));
    }
    if (TakeWord("true")) return Value(true);
    if (TakeWord("false")) return Value(false);
    double number = 0;
    const char* const begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), number);
    const bool word_follows = end != text_.data() + text_.size() && IsWordByte(*end);
    const bool starts_well =
        at_ < text_.size() && (*begin == '-' || *begin == '.' || std::isdigit(*begin) != 0);
    if (error != std::errc() || word_follows || !starts_well)
      return Wanted("text in quotes, a number, true or false");
    at_ += static_cast<size_t>(end - begin);
    return Value(number);
  }
  // With \\, \", \', \n and \t.
  absl::StatusOr<std::string> ParseString() {
    const size_t begin = at_;
    const char quote = text_[at_++];
    std::string text;
    for (; at_ < text_.size() && text_[at_] != quote; ++at_) {
      char c = text_[at_];
      if (c == '\\') {
        constexpr std::string_view kEscapes = "\\\"'nt", kMeanings = "\\\"'\n\t";
        const size_t which = ++at_ < text_.size() ? kEscapes.find(text_[at_]) : std::string::npos;
        if (which == std::string::npos) return Wanted("one of \\\\ \\\" \\' \\n \\t");
        c = kMeanings[which];
      }
      text += c;
    }
    if (at_ == text_.size()) {
      at_ = begin;
      return Wanted("text that ends with the quote it begins with");
    }
    ++at_;
    return text;
  }

  const std::string_view text_;
  size_t at_ = 0;
};

// Meta is read once a sample, and only where it is asked for.
class Meta {
 public:
  explicit Meta(std::string_view json) : json_(json) {}
  std::optional<Value> Find(const std::string& name) {
    if (!read_) {
      read_ = true;
      if (!json_.empty()) {
        if (absl::StatusOr<Json> parsed = ParseJson(json_); parsed.ok())
          object_ = *std::move(parsed);
      }
    }
    if (!object_.is_object()) return std::nullopt;
    const auto found = object_.find(name);
    if (found == object_.end()) return std::nullopt;
    if (found->is_string()) return Value(found->get<std::string>());
    if (found->is_boolean()) return Value(found->get<bool>());
    if (found->is_number()) return Value(found->get<double>());
    return std::nullopt;
  }

 private:
  const std::string_view json_;
  bool read_ = false;
  Json object_;
};

bool HoldsFor(const Node& node, const SampleFacts& sample, Meta& meta) {
  const auto holds = [&](const Node& child) { return HoldsFor(child, sample, meta); };
  switch (node.kind) {
    case Node::Kind::kAll: return std::all_of(node.children.begin(), node.children.end(), holds);
    case Node::Kind::kAny: return std::any_of(node.children.begin(), node.children.end(), holds);
    case Node::Kind::kNone: return !holds(node.children.front());
    case Node::Kind::kCompare: break;
  }
  const std::optional<Value> found =
      node.field != nullptr ? node.field->read(sample) : meta.Find(node.meta_name);
  return found && std::any_of(node.values.begin(), node.values.end(), [&](const Value& value) {
           return Compare(*found, node.relation, value);
         });
}

}  // namespace

SampleFacts FactsOf(const SampleRecord& record) {
  SampleFacts facts{.id = record.id,
                    .source = record.source,
                    .split = record.split,
                    .finish = record.finish_reason,
                    .meta_json = record.meta_json,
                    .index = record.source_index,
                    .prompt_tokens = record.prompt_tokens,
                    .tokens = static_cast<int64_t>(record.input_ids.size()),
                    .truncated = record.truncated};
  for (const uint8_t supervised : record.loss_mask) facts.supervised_tokens += supervised;
  if (record.finish_reason == "prefill") return facts;
  facts.generated_tokens = facts.tokens - facts.prompt_tokens;
  double sum = 0;
  int64_t count = 0;
  for (auto t = static_cast<size_t>(record.prompt_tokens); t < record.logprobs.size(); ++t) {
    if (std::isnan(record.logprobs[t])) continue;
    sum += double{record.logprobs[t]};
    ++count;
  }
  if (count > 0) facts.logprob = sum / static_cast<double>(count);
  return facts;
}

absl::StatusOr<SampleFilter> SampleFilter::Parse(std::string_view text) {
  if (std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isspace(c) != 0; }))
    return SampleFilter();
  STATETAP_ASSIGN_OR_RETURN(Node root, Parser(text).ParseAll());
  return SampleFilter(std::make_shared<const Node>(std::move(root)));
}

bool SampleFilter::Holds(const SampleFacts& sample) const {
  if (root_ == nullptr) return true;
  Meta meta(sample.meta_json);
  return HoldsFor(*root_, sample, meta);
}

}  // namespace statetap
