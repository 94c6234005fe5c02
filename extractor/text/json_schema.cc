#include "extractor/text/json_schema.h"

#include <algorithm>
#include <initializer_list>
#include <set>

#include "extractor/base/json.h"
#include "extractor/text/python_text.h"

namespace statetap {
namespace {

absl::Status Refuse(std::string_view what, const Json& value) {
  return absl::InvalidArgumentError(fmt::format("{}: {}", what, PythonJson(value).substr(0, 80)));
}

SchemaType TextType(std::string_view text) { return {.text = std::string(text)}; }

// The type with the schema's description, and those of its keys that count as constraints.
absl::StatusOr<SchemaType> Described(const Json& schema, SchemaType::Form form,
                                     std::initializer_list<std::string_view> sorted_keys = {}) {
  SchemaType type{.form = form};
  STATETAP_ASSIGN_OR_RETURN(type.description, DescriptionOf(schema));
  for (const std::string_view key : sorted_keys) {
    const auto found = schema.find(key);
    if (found == schema.end()) continue;
    const std::optional<std::string> value = PythonStr(*found);
    if (!value) return Refuse(fmt::format("{} is no scalar", key), *found);
    type.constraints += fmt::format("{}{}: {}", type.constraints.empty() ? "" : ", ", key, *value);
  }
  return type;
}

// A list of two types counts as one if the other is null; longer ones are refused.
absl::StatusOr<Json> EnumValueType(const Json& type) {
  if (!type.is_array()) return type;
  if (type.size() == 1) return type[0];
  if (type.size() == 2 && (type[0] == "null" || type[1] == "null"))
    return type[0] == "null" ? type[1] : type[0];
  return Refuse("enum of several types", type);
}

bool EnumValueFits(const Json& value, const Json& type) {
  const bool integer =
      value.is_number_integer() || value.is_boolean() || BigInteger(value);  // as in Python
  if (value.is_null()) return true;
  if (type == "string") return value.is_string();
  if (type == "number") return integer || value.is_number();
  if (type == "integer") return integer;
  if (type == "boolean") return value.is_boolean();
  return true;
}

absl::StatusOr<SchemaType> ReadEnum(const Json& schema) {
  STATETAP_ASSIGN_OR_RETURN(SchemaType type, Described(schema, SchemaType::Form::kText));
  const Json& values = schema["enum"];
  if (!values.is_array()) return Refuse("enum is no list", values);
  Json value_type;
  if (schema.contains("type")) {
    STATETAP_ASSIGN_OR_RETURN(value_type, EnumValueType(schema["type"]));
  }
  std::string_view before;
  for (const Json& value : values) {
    const std::optional<std::string> text = PythonStr(value);
    if (!text || !EnumValueFits(value, value_type)) return Refuse("enum value", value);
    const std::string_view quote = value.is_string() ? "\"" : "";  // and nothing is escaped
    type.text += fmt::format("{}{}{}{}", before, quote, *text, quote);
    before = " | ";
  }
  return type;
}

absl::StatusOr<SchemaType> ReadTypeList(const Json& schema) {
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"string", "string"}, {"number", "number"}, {"integer", "number"},  {"boolean", "boolean"},
      {"null", "null"},     {"object", "{}"},     {"array", "Array<any>"}};
  STATETAP_ASSIGN_OR_RETURN(SchemaType type, Described(schema, SchemaType::Form::kText));
  std::string_view before;
  for (const Json& name : schema["type"]) {
    const auto* found = std::find_if(std::begin(kNames), std::end(kNames),
                                     [&](const auto& known) { return name == known.first; });
    if (found == std::end(kNames)) return Refuse("unknown type", name);
    type.text += fmt::format("{}{}", before, found->second);
    before = " | ";
  }
  return type;
}

absl::StatusOr<SchemaType> ReadScalar(const Json& schema) {
  const std::optional<std::string> name = PythonStr(schema["type"]);
  if (!name) return Refuse("type is no name", schema["type"]);
  absl::StatusOr<SchemaType> type =
      *name == "string"
          ? Described(schema, SchemaType::Form::kText, {"maxLength", "minLength", "pattern"})
      : *name == "number" || *name == "integer"
          ? Described(schema, SchemaType::Form::kText, {"maximum", "minimum"})
          : Described(schema, SchemaType::Form::kText);
  if (type.ok()) type->text = *name == "integer" ? "number" : *name;
  return type;
}

// The names in `required`; where it is no list it names none, as far as the vendor lets it pass.
absl::StatusOr<std::set<std::string>> RequiredNames(const Json& schema) {
  std::set<std::string> names;
  const auto required = schema.find("required");
  if (required == schema.end() || required->is_string() || required->is_object()) return names;
  if (!required->is_array()) return Refuse("required is no list", *required);
  for (const Json& name : *required) {
    if (name.is_structured()) return Refuse("required holds no name", name);
    if (name.is_string()) names.insert(name.get<std::string>());
  }
  return names;
}

std::string DefaultText(const Json& schema) {
  const Json* value = FindMember(schema, "default");
  if (value == nullptr) return "";
  return value->is_number() || value->is_boolean() ? *PythonStr(*value) : PythonJson(*value);
}

}  // namespace

absl::StatusOr<std::string> DescriptionOf(const Json& object) {
  const auto found = object.find("description");
  if (found == object.end() || !PythonTruth(*found)) return "";
  if (!found->is_string()) return Refuse("description is no string", *found);
  return found->get<std::string>();
}

absl::StatusOr<SchemaType> SchemaReader::Read(const Json& schema) {
  if (schema.is_boolean()) return TextType(schema.get<bool>() ? "any" : "null");
  if (!schema.is_object()) return Refuse("no schema", schema);
  if (schema.contains("$ref")) return ReadReference(schema);
  if (schema.contains("anyOf")) return ReadAnyOf(schema);
  if (schema.contains("enum")) return ReadEnum(schema);
  if (schema.contains("type")) {
    const Json& type = schema["type"];
    if (type.is_array()) return ReadTypeList(schema);
    if (type == "object") return ReadObject(schema);
    if (type == "array") return ReadArray(schema);
    return ReadScalar(schema);
  }
  if (schema.empty()) return TextType("any");
  return Refuse("schema without type, enum, anyOf and $ref", schema);
}

absl::StatusOr<SchemaType> SchemaReader::ReadReference(const Json& schema) {
  STATETAP_ASSIGN_OR_RETURN(SchemaType type, Described(schema, SchemaType::Form::kText));
  const Json& reference = schema["$ref"];
  if (!reference.is_string()) return Refuse("$ref is no string", reference);
  std::string_view target = reference.get_ref<const std::string&>();
  if (target == "#") {
    refers_to_itself_ = true;
    type.text = "parameters";
    return type;
  }
  if (!target.starts_with("#/$defs/")) return Refuse("$ref outside of $defs", reference);
  target.remove_prefix(target.rfind('/') + 1);
  const bool known = std::any_of(definitions_.begin(), definitions_.end(),
                                 [&](const auto& entry) { return entry.first == target; });
  if (!known) return Refuse("$ref to an unknown definition", reference);
  type.text = target;
  return type;
}

absl::StatusOr<SchemaType> SchemaReader::ReadAnyOf(const Json& schema) {
  STATETAP_ASSIGN_OR_RETURN(SchemaType type, Described(schema, SchemaType::Form::kAnyOf));
  const Json& parts = schema["anyOf"];
  if (!parts.is_array()) return Refuse("anyOf is no list", parts);
  for (const Json& part : parts) {
    STATETAP_ASSIGN_OR_RETURN(SchemaType read, Read(part));
    type.parts.push_back(std::move(read));
  }
  return type;
}

absl::StatusOr<SchemaType> SchemaReader::ReadArray(const Json& schema) {
  STATETAP_ASSIGN_OR_RETURN(SchemaType type,
                            Described(schema, SchemaType::Form::kArray, {"maxItems", "minItems"}));
  const auto items = schema.find("items");
  if (items == schema.end() || !PythonTruth(*items)) {
    type.parts.push_back(TextType("any"));
    return type;
  }
  STATETAP_ASSIGN_OR_RETURN(SchemaType item, Read(*items));
  type.parts.push_back(std::move(item));
  return type;
}

absl::StatusOr<SchemaType> SchemaReader::ReadObject(const Json& schema) {
  STATETAP_ASSIGN_OR_RETURN(SchemaType type, Described(schema, SchemaType::Form::kObject));
  if (const auto definitions = schema.find("$defs"); definitions != schema.end())
    STATETAP_RETURN_IF_ERROR(Register(*definitions));
  STATETAP_RETURN_IF_ERROR(ReadAdditional(schema, &type));
  STATETAP_RETURN_IF_ERROR(ReadMembers(schema, &type));
  return type;
}

absl::Status SchemaReader::Register(const Json& definitions) {
  if (!PythonTruth(definitions)) return absl::OkStatus();
  if (!definitions.is_object()) return Refuse("$defs is no object", definitions);
  for (const auto& [name, schema] : definitions.items()) {
    const auto known = std::find_if(definitions_.begin(), definitions_.end(),
                                    [&](const auto& entry) { return entry.first == name; });
    if (known != definitions_.end()) {
      known->second = &schema;
    } else {
      definitions_.emplace_back(name, &schema);
    }
  }
  return absl::OkStatus();
}

absl::Status SchemaReader::ReadAdditional(const Json& schema, SchemaType* type) {
  const Json* additional = FindMember(schema, "additionalProperties");
  if (additional == nullptr) return absl::OkStatus();
  if (additional->is_boolean()) {
    type->additional.push_back(TextType(additional->get<bool>() ? "any" : "never"));
    return absl::OkStatus();
  }
  if (!additional->is_object()) return Refuse("additionalProperties is no schema", *additional);
  STATETAP_ASSIGN_OR_RETURN(SchemaType read, Read(*additional));
  type->additional.push_back(std::move(read));
  return absl::OkStatus();
}

absl::Status SchemaReader::ReadMembers(const Json& schema, SchemaType* type) {
  const auto properties = schema.find("properties");
  if (properties == schema.end()) return absl::OkStatus();
  if (!properties->is_object()) return Refuse("properties is no object", *properties);
  STATETAP_ASSIGN_OR_RETURN(const std::set<std::string> required, RequiredNames(schema));
  for (const auto& [name, property] : properties->items()) {
    STATETAP_ASSIGN_OR_RETURN(SchemaType read, Read(property));
    type->members.push_back({.name = name,
                             .optional = !required.contains(name),
                             .default_text = DefaultText(property),
                             .type = std::move(read)});
  }
  return absl::OkStatus();
}

}  // namespace statetap
