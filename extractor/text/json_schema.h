// A tool's parameters, read from JSON schema into what K2.5's declarations can say. Follows the
// vendor's encoder in what it refuses and in what it overlooks.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "extractor/base/json_fwd.h"
#include "extractor/base/status.h"

namespace statetap {

struct SchemaMember;

struct SchemaType {
  enum class Form { kText, kObject, kArray, kAnyOf } form = Form::kText;
  std::string text;  // kText: as it is printed
  std::string description;
  std::string constraints;             // "maximum: 30, minimum: 1"
  std::vector<SchemaMember> members;   // kObject, in the schema's order
  std::vector<SchemaType> additional;  // kObject: the type of further keys, or empty
  std::vector<SchemaType> parts;       // kArray: the item's type; kAnyOf: the alternatives
};

struct SchemaMember {
  std::string name;
  bool optional = true;
  std::string default_text;  // as printed; empty if there is none
  SchemaType type;
};

// One function's parameters: definitions that are met on the way can be referred to from then on.
class SchemaReader {
 public:
  // `schema`: an object's schema, whatever its `type` says.
  absl::StatusOr<SchemaType> ReadObject(const Json& schema);
  absl::StatusOr<SchemaType> Read(const Json& schema);

  // Name and schema, in order of their first registration; they point into what was read.
  const std::vector<std::pair<std::string, const Json*>>& definitions() const {
    return definitions_;
  }
  bool refers_to_itself() const { return refers_to_itself_; }

 private:
  absl::StatusOr<SchemaType> ReadReference(const Json& schema);
  absl::StatusOr<SchemaType> ReadAnyOf(const Json& schema);
  absl::StatusOr<SchemaType> ReadArray(const Json& schema);
  absl::Status ReadMembers(const Json& schema, SchemaType* type);
  absl::Status ReadAdditional(const Json& schema, SchemaType* type);
  absl::Status Register(const Json& definitions);

  std::vector<std::pair<std::string, const Json*>> definitions_;
  bool refers_to_itself_ = false;
};

// The `description` of `object`: empty where it is missing or empty, INVALID_ARGUMENT where it is
// no string.
absl::StatusOr<std::string> DescriptionOf(const Json& object);

}  // namespace statetap
