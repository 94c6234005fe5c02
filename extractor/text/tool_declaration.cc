#include "extractor/text/tool_declaration.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "extractor/base/json.h"
#include "extractor/text/json_schema.h"
#include "extractor/text/python_text.h"

namespace statetap {
namespace {

constexpr std::string_view kIndent = "  ";

std::string Deeper(std::string_view indent) { return fmt::format("{}{}", indent, kIndent); }

std::string Joined(const std::vector<std::string>& parts, std::string_view separator) {
  return fmt::format("{}", fmt::join(parts, separator));
}

// A comment for each line, without the last line's end; empty lines stay empty.
std::string DescriptionText(std::string_view description, std::string_view indent) {
  std::string text;
  for (;;) {
    const size_t end = std::min(description.find('\n'), description.size());
    if (end > 0) text += fmt::format("{}// {}", indent, description.substr(0, end));
    if (end == description.size()) return text;
    text += '\n';
    description.remove_prefix(end + 1);
  }
}

// The comment lines above a member or an array's item.
std::string CommentText(const SchemaType& type, std::string_view indent) {
  std::string text;
  if (!type.description.empty()) text += DescriptionText(type.description, indent) + "\n";
  if (!type.constraints.empty()) text += fmt::format("{}// {}\n", indent, type.constraints);
  return text;
}

std::string TypeText(const SchemaType& type, std::string_view indent);

std::string MemberText(const SchemaMember& member, std::string_view indent) {
  std::string text = CommentText(member.type, indent);
  if (!member.default_text.empty())
    text += fmt::format("{}// Default: {}\n", indent, member.default_text);
  text += fmt::format("{}{}{}: {}", indent, member.name, member.optional ? "?" : "",
                      TypeText(member.type, indent));
  return text;
}

// Required members come first, each group sorted by name.
std::string ObjectText(const SchemaType& type, std::string_view indent) {
  std::vector<const SchemaMember*> members;
  for (const SchemaMember& member : type.members) members.push_back(&member);
  std::sort(members.begin(), members.end(), [](const SchemaMember* a, const SchemaMember* b) {
    return std::tie(a->optional, a->name) < std::tie(b->optional, b->name);
  });
  const std::string inner = Deeper(indent);
  std::vector<std::string> lines;
  for (const SchemaMember* member : members) lines.push_back(MemberText(*member, inner));
  for (const SchemaType& additional : type.additional)
    lines.push_back(fmt::format("{}[k: string]: {}", inner, TypeText(additional, inner)));
  if (lines.empty()) return "{}";
  return fmt::format("{{\n{}\n{}}}", Joined(lines, ",\n"), indent);
}

std::string ArrayText(const SchemaType& item, std::string_view indent) {
  const std::string inner = Deeper(indent);
  const std::string comment = CommentText(item, inner);
  if (comment.empty()) return fmt::format("Array<{}>", TypeText(item, indent));
  return fmt::format("Array<\n{}{}{}\n{}>", comment, inner, TypeText(item, inner), indent);
}

std::string TypeText(const SchemaType& type, std::string_view indent) {
  switch (type.form) {
    case SchemaType::Form::kObject: return ObjectText(type, indent);
    case SchemaType::Form::kArray: return ArrayText(type.parts[0], indent);
    case SchemaType::Form::kText: return type.text;
    case SchemaType::Form::kAnyOf: break;
  }
  std::vector<std::string> parts;
  for (const SchemaType& part : type.parts) parts.push_back(TypeText(part, indent));
  return Joined(parts, " | ");
}

// Parameters that refer to themselves ("$ref": "#") get a name: members in the schema's order,
// further keys left out.
std::string SelfInterface(const SchemaType& parameters) {
  std::vector<std::string> members;
  for (const SchemaMember& member : parameters.members)
    members.push_back(MemberText(member, kIndent));
  const std::string body = Joined(members, ",\n");
  return fmt::format("interface parameters {{{}}}",
                     body.empty() ? body : fmt::format("\n{}\n", body));
}

absl::StatusOr<std::string> DefinitionInterface(SchemaReader& reader, const std::string& name,
                                                const Json& schema) {
  STATETAP_ASSIGN_OR_RETURN(const SchemaType type, reader.Read(schema));
  if (!schema.is_object())
    return absl::InvalidArgumentError(fmt::format("definition {} is no object", name));
  STATETAP_ASSIGN_OR_RETURN(const std::string description, DescriptionOf(schema));
  return fmt::format("{}{}interface {} {}", DescriptionText(description, ""),
                     description.empty() ? "" : "\n", name, TypeText(type, ""));
}

absl::StatusOr<std::string> FunctionText(const Json& function) {
  if (!function.is_object()) return absl::InvalidArgumentError("a function is no object");
  const Json no_parameters = Json::object();
  const Json* parameters = FindMember(function, "parameters");
  if (parameters == nullptr || !PythonTruth(*parameters)) parameters = &no_parameters;
  if (!parameters->is_object()) return absl::InvalidArgumentError("parameters is no object");

  SchemaReader reader;
  STATETAP_ASSIGN_OR_RETURN(const SchemaType type, reader.ReadObject(*parameters));
  const bool named = reader.refers_to_itself();
  std::vector<std::string> lines;
  if (named) lines.push_back(SelfInterface(type));
  const auto definitions = reader.definitions();  // reading one may register more, never printed
  for (const auto& [name, schema] : definitions) {
    STATETAP_ASSIGN_OR_RETURN(std::string text, DefinitionInterface(reader, name, *schema));
    lines.push_back(std::move(text));
  }
  STATETAP_ASSIGN_OR_RETURN(const std::string description, DescriptionOf(function));
  if (!description.empty()) lines.push_back(DescriptionText(description, ""));

  const Json* name = FindMember(function, "name");
  const std::optional<std::string> name_text = name == nullptr ? "function" : PythonStr(*name);
  if (!name_text) return absl::InvalidArgumentError("a function's name is no string");
  lines.push_back(fmt::format("type {} = (_: {}) => any;", *name_text,
                              named ? "parameters" : TypeText(type, "")));
  return Joined(lines, "\n");
}

}  // namespace

absl::StatusOr<std::string> TypeScriptDeclaration(const Json& tools) {
  std::vector<std::string> functions;
  for (const Json& tool : tools) {
    if (!tool.is_object()) return absl::InvalidArgumentError("a tool is no object");
    const Json* type = FindMember(tool, "type");
    const Json* function = FindMember(tool, "function");
    if (type == nullptr || *type != "function") continue;
    if (function == nullptr || !PythonTruth(*function)) continue;
    STATETAP_ASSIGN_OR_RETURN(std::string text, FunctionText(*function));
    functions.push_back(std::move(text));
  }
  if (functions.empty()) return "";
  return fmt::format("# Tools\n\n## functions\nnamespace functions {{\n{}\n}}\n",
                     Joined(functions, "\n"));
}

std::string ToolDeclarationText(const Json& tools) {
  const absl::StatusOr<std::string> text = TypeScriptDeclaration(tools);
  return text.ok() && !text->empty() ? *text : PythonJson(tools, kCompactSeparators);
}

}  // namespace statetap
