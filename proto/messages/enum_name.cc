#include "proto/messages/enum_name.h"

#include <cctype>
#include <string_view>

namespace statetap {

std::string EnumName(const google::protobuf::EnumValueDescriptor& value) {
  constexpr std::string_view kZero = "UNSPECIFIED";
  const auto* zero = value.type()->FindValueByNumber(0);
  size_t prefix = 0;
  if (zero != nullptr && zero->name().size() > kZero.size() && zero->name().ends_with(kZero))
    prefix = zero->name().size() - kZero.size();
  std::string name = value.name();
  if (name.size() > prefix && name.starts_with(zero->name().substr(0, prefix)))
    name.erase(0, prefix);
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

}  // namespace statetap
