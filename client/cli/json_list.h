// {"samples":[…]} written element by element: a list of millions needs no memory.
#pragma once

#include <google/protobuf/message.h>

#include <ostream>
#include <string_view>

#include "client/lib/proto_json.h"

namespace statetap {

class JsonListWriter {
 public:
  JsonListWriter(std::ostream& out, std::string_view name) : out_(out) {
    out_ << "{\"" << name << "\":[";
  }
  void Add(const google::protobuf::Message& message) {
    out_ << (first_ ? "" : ",") << DumpJson(JsonOf(message));
    first_ = false;
  }
  void Finish() { out_ << "]}\n"; }

 private:
  std::ostream& out_;
  bool first_ = true;
};

}  // namespace statetap
