#include "server/rpc/feature_wire.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>

#include <string>
#include <utility>
#include <vector>

namespace statetap {
namespace {

using google::protobuf::internal::WireFormatLite;

void WriteLength(google::protobuf::io::CodedOutputStream& to, int field, size_t bytes) {
  to.WriteTag(WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
  to.WriteVarint64(bytes);
}

std::string Prefix(const v1::SampleData& data, size_t states_bytes) {
  // The field of the states first, to know its length.
  std::string field;
  {
    google::protobuf::io::StringOutputStream stream(&field);
    google::protobuf::io::CodedOutputStream coded(&stream);
    WriteLength(coded, v1::SampleData::kStatesFieldNumber, states_bytes);
  }
  std::string prefix;
  {
    google::protobuf::io::StringOutputStream stream(&prefix);
    google::protobuf::io::CodedOutputStream coded(&stream);
    WriteLength(coded, v1::StreamFeaturesResponse::kDataFieldNumber,
                data.ByteSizeLong() + field.size() + states_bytes);
    data.SerializeToCodedStream(&coded);
  }
  return prefix + field;
}

grpc::Slice Lend(std::span<const std::byte> bytes, const std::shared_ptr<const void>& owner) {
  using Owner = std::shared_ptr<const void>;
  return grpc::Slice(
      const_cast<std::byte*>(bytes.data()), bytes.size(),
      [](void* held) { delete static_cast<Owner*>(held); }, new Owner(owner));
}

}  // namespace

grpc::ByteBuffer ToWire(const v1::StreamFeaturesResponse& message, const StatesView& states) {
  std::vector<grpc::Slice> slices;
  if (states.parts.empty()) {
    slices.emplace_back(message.SerializeAsString());
  } else {
    slices.emplace_back(Prefix(message.data(), states.bytes()));
    for (const auto& part : states.parts) slices.push_back(Lend(part, states.owner));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace statetap
