// Digests: XXH3 for payloads (memory speed), SHA-256 for identities (checkpoints, templates,
// tokenizers).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace statetap {

// XXH3, 64 bits, seed 0; fed in pieces.
class Xxh3 {
 public:
  Xxh3();
  ~Xxh3();
  Xxh3(Xxh3&&) noexcept;
  Xxh3& operator=(Xxh3&&) noexcept;
  void Update(std::span<const std::byte> bytes);
  uint64_t Digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

uint64_t Xxh3Of(std::span<const std::byte> bytes);
std::string HexOf(uint64_t digest);  // 16 lower-case digits

// SHA-256, fed in pieces.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  void Update(std::span<const std::byte> bytes);
  std::string Hex();  // 64 lower-case digits. Ends it: nothing can be added.

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string Sha256Hex(std::string_view content);

}  // namespace statetap
