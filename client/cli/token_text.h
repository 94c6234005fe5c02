// The text of token ids, from a tokenizer here or from the server's.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/lib/client.h"
#include "client/lib/local_model.h"

namespace statetap {

class TokenText {
 public:
  virtual ~TokenText() = default;
  // One text for each run of ids; half a character at a run's edge becomes U+FFFD.
  virtual absl::StatusOr<std::vector<std::string>> TextOf(
      const std::vector<std::vector<int32_t>>& runs) = 0;
  // One a token: 1 where it is a special token, 0 where it is text, whatever that spells.
  virtual absl::StatusOr<std::string> SpecialsOf(const std::vector<int32_t>& ids) = 0;
};

std::unique_ptr<TokenText> TextFromServer(Client& client);
std::unique_ptr<TokenText> TextFromModel(const LocalModel& model);

}  // namespace statetap
