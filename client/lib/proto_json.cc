#include "client/lib/proto_json.h"

#include <google/protobuf/descriptor.h>

#include <cmath>
#include <cstdlib>

#include "extractor/base/json.h"

namespace statetap {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// The shortest decimal that is this float: 0.1 stays 0.1 and does not become 0.10000000149.
Json Number(float value) {
  if (!std::isfinite(value)) return nullptr;
  return std::strtod(fmt::format("{}", value).c_str(), nullptr);
}

Json Bytes(const std::string& bytes) {
  Json list = Json::array();
  for (const char byte : bytes) list.push_back(static_cast<unsigned char>(byte));
  return list;
}

Json Text(const FieldDescriptor& field, const std::string& text) {
  return field.type() == FieldDescriptor::TYPE_BYTES ? Bytes(text) : Json(text);
}

Json Single(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: return reflection.GetInt32(message, &field);
    case FieldDescriptor::CPPTYPE_INT64: return reflection.GetInt64(message, &field);
    case FieldDescriptor::CPPTYPE_UINT32: return reflection.GetUInt32(message, &field);
    case FieldDescriptor::CPPTYPE_UINT64: return reflection.GetUInt64(message, &field);
    case FieldDescriptor::CPPTYPE_DOUBLE: return JsonNumber(reflection.GetDouble(message, &field));
    case FieldDescriptor::CPPTYPE_FLOAT: return Number(reflection.GetFloat(message, &field));
    case FieldDescriptor::CPPTYPE_BOOL: return reflection.GetBool(message, &field);
    case FieldDescriptor::CPPTYPE_ENUM: return EnumName(*reflection.GetEnum(message, &field));
    case FieldDescriptor::CPPTYPE_STRING: return Text(field, reflection.GetString(message, &field));
    case FieldDescriptor::CPPTYPE_MESSAGE: return JsonOf(reflection.GetMessage(message, &field));
  }
  return nullptr;
}

Json Element(const Message& message, const FieldDescriptor& field, int i) {
  const Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: return reflection.GetRepeatedInt32(message, &field, i);
    case FieldDescriptor::CPPTYPE_INT64: return reflection.GetRepeatedInt64(message, &field, i);
    case FieldDescriptor::CPPTYPE_UINT32: return reflection.GetRepeatedUInt32(message, &field, i);
    case FieldDescriptor::CPPTYPE_UINT64: return reflection.GetRepeatedUInt64(message, &field, i);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return JsonNumber(reflection.GetRepeatedDouble(message, &field, i));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return Number(reflection.GetRepeatedFloat(message, &field, i));
    case FieldDescriptor::CPPTYPE_BOOL: return reflection.GetRepeatedBool(message, &field, i);
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumName(*reflection.GetRepeatedEnum(message, &field, i));
    case FieldDescriptor::CPPTYPE_STRING:
      return Text(field, reflection.GetRepeatedString(message, &field, i));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return JsonOf(reflection.GetRepeatedMessage(message, &field, i));
  }
  return nullptr;
}

}  // namespace

Json JsonNumber(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json JsonOf(const Message& message) {
  Json object = Json::object();
  const auto* descriptor = message.GetDescriptor();
  const Reflection& reflection = *message.GetReflection();
  for (int f = 0; f < descriptor->field_count(); ++f) {
    const FieldDescriptor& field = *descriptor->field(f);
    if (field.is_repeated()) {
      Json list = Json::array();
      const int size = reflection.FieldSize(message, &field);
      for (int i = 0; i < size; ++i) list.push_back(Element(message, field, i));
      object[field.name()] = std::move(list);
    } else if (field.has_presence() && !reflection.HasField(message, &field)) {
      if (field.real_containing_oneof() == nullptr) object[field.name()] = nullptr;
    } else {
      object[field.name()] = Single(message, field);
    }
  }
  return object;
}

}  // namespace statetap
