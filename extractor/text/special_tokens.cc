#include "extractor/text/special_tokens.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <set>

#include "extractor/base/json.h"

namespace statetap {

absl::StatusOr<SpecialTokens> SpecialTokens::Parse(const Json& config, int32_t first_id) {
  SpecialTokens tokens;
  tokens.first_id_ = first_id;
  tokens.names_.resize(kCount);
  const Json* entries = FindMember(config, "added_tokens_decoder");
  if (entries == nullptr || !entries->is_object())
    return absl::InvalidArgumentError(
        "added_tokens_decoder is missing or no object; it names the special tokens");
  for (const auto& [key, entry] : entries->items())
    STATETAP_RETURN_IF_ERROR(tokens.Name(key, entry));
  if (!entries->empty() && tokens.lowest_ > first_id) {
    return absl::InvalidArgumentError(
        fmt::format("added_tokens_decoder begins at {}, but tiktoken.model has the ordinary tokens "
                    "0 to {} only: "
                    "one of the two files is cut or of another model",
                    tokens.lowest_, first_id - 1));
  }
  STATETAP_RETURN_IF_ERROR(tokens.BuildIndex());
  return tokens;
}

absl::Status SpecialTokens::Name(const std::string& key, const Json& entry) {
  int32_t id = -1;
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
  if (error != std::errc() || end != key.data() + key.size() || id < 0)
    return absl::InvalidArgumentError(
        fmt::format("added_tokens_decoder: \"{}\" is no token id", key));
  const Json* content = FindMember(entry, "content");
  if (content == nullptr || !content->is_string() || content->get_ref<const std::string&>().empty())
    return absl::InvalidArgumentError(
        fmt::format("added_tokens_decoder[{}].content is not a name", key));
  if (id < first_id_)
    return absl::InvalidArgumentError(
        fmt::format("added_tokens_decoder[{}] is the id of an ordinary token; tiktoken.model has {}"
                    " of them and specials come behind",
                    key, first_id_));
  lowest_ = std::min(lowest_, id);
  if (Contains(id)) names_[id - first_id_] = content->get<std::string>();
  return absl::OkStatus();
}

absl::Status SpecialTokens::BuildIndex() {
  std::set<size_t, std::greater<>> lengths;
  std::set<char> first_bytes;
  for (int32_t id = first_id_; id < first_id_ + kCount; ++id) {
    std::string& name = names_[id - first_id_];
    if (name.empty()) name = fmt::format("<|reserved_token_{}|>", id);
    const auto [other, added] = ids_.emplace(name, id);
    if (!added)
      return absl::InvalidArgumentError(
          fmt::format("added_tokens_decoder names both {} and {} \"{}\"", other->second, id, name));
    lengths.insert(name.size());
    first_bytes.insert(name[0]);
  }
  lengths_.assign(lengths.begin(), lengths.end());
  first_bytes_.assign(first_bytes.begin(), first_bytes.end());
  return absl::OkStatus();
}

std::optional<int32_t> SpecialTokens::IdOf(std::string_view name) const {
  const auto found = ids_.find(name);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

SpecialTokens::Match SpecialTokens::Find(std::string_view text, size_t from) const {
  for (size_t at = from; (at = text.find_first_of(first_bytes_, at)) != std::string_view::npos;
       ++at) {
    for (const size_t length : lengths_) {
      if (at + length > text.size()) continue;
      if (const auto id = IdOf(text.substr(at, length))) return {at, at + length, *id};
    }
  }
  return {text.size(), text.size(), 0};
}

}  // namespace statetap
