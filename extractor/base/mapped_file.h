// A file mapped for reading. A file that was cut or cannot be read under its mapping does not end
// the process, as SIGBUS would: the page reads as zeros from then on, and damaged() says so.
//
// Needs the process's SIGBUS handler; signals of other origin get the default action.
#pragma once

#include <csignal>
#include <cstddef>
#include <memory>
#include <span>

#include "extractor/base/file.h"
#include "extractor/base/status.h"

namespace statetap {

class MappedFile {
 public:
  // The whole file as long as it is now. The descriptor may be closed afterwards, the file
  // unlinked.
  static absl::StatusOr<std::shared_ptr<const MappedFile>> Map(const File& file);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  // Some page could not be read. Looked at after the bytes were used.
  bool damaged() const;

 private:
  struct Slot;
  MappedFile(std::span<const std::byte> bytes, Slot* slot) : bytes_(bytes), slot_(slot) {}
  static void OnBusError(int signal, siginfo_t* info, void* context);

  const std::span<const std::byte> bytes_;
  Slot* const slot_;
};

}  // namespace statetap
