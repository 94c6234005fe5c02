// Enum values as people and JSON see them.
#pragma once

#include <google/protobuf/descriptor.h>

#include <string>

namespace statetap {

// In lower case and without what all values of the enum begin with: JOB_STATE_QUEUED → "queued".
std::string EnumName(const google::protobuf::EnumValueDescriptor& value);

}  // namespace statetap
