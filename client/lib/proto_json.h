// Messages of statetap.v1 as the JSON that people and scripts rely on: the proto's field names,
// every field printed with its default, 64-bit integers as numbers, enums in lower case without
// their prefix ("running"), bytes as a list of numbers, NaN and infinities as null, an optional or
// message field that is not set as null, an unset member of a oneof left out.
#pragma once

#include <google/protobuf/message.h>

#include <string>

#include "extractor/base/json.h"
#include "proto/messages/enum_name.h"

namespace statetap {

// Null for NaN and infinities.
Json JsonNumber(double value);

Json JsonOf(const google::protobuf::Message& message);

}  // namespace statetap
