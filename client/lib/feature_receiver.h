// Stored samples of one or several jobs over the network, whole, in the stream's order, through
// breaks of the connection.
//
// What was acknowledged is not sent to its group again; a receiver that comes back goes on behind
// it. Within one receiver every sample is handed out once, whatever breaks. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "client/lib/client.h"
#include "extractor/shard/shard_writer.h"

namespace statetap {

struct ReceivedSample {
  uint64_t sequence = 0;  // counts from 1 within the receiver; for Ack
  int job_index = 0;      // of the stream's jobs
  SampleRecord record;
  std::vector<std::vector<uint16_t>> states;  // by boundary of the header: bf16 [tokens, hidden]
};

// Puts the messages of one sample together. Used for streams and for single samples.
class ReceivedAssembler {
 public:
  explicit ReceivedAssembler(const v1::StreamHeader& header);
  // DATA_LOSS for messages that do not fit together.
  absl::Status Begin(const v1::SampleHeader& sample);
  absl::Status Add(const v1::SampleData& data);
  bool started() const { return started_; }
  bool complete() const { return started_ && missing_ == 0; }
  uint64_t delivery() const { return delivery_; }
  // DATA_LOSS where the checksum differs; not looked at where `partial`: the sample's checksum is
  // over all its boundaries. REQUIRES: complete().
  enum class Boundaries { kAll, kSubset };
  absl::StatusOr<ReceivedSample> Take(Boundaries boundaries);

 private:
  size_t hidden_;
  std::vector<int> boundaries_;
  ReceivedSample sample_;
  uint64_t delivery_ = 0, checksum_ = 0;
  size_t missing_ = 0;          // values still to come
  std::vector<size_t> filled_;  // values by boundary
  bool started_ = false;
};

// One stored sample by id, all boundaries or, with none, only its tokens.
struct FetchedSample {
  v1::StreamHeader header;
  ReceivedSample sample;
};
absl::StatusOr<FetchedSample> FetchSample(Client& client, const std::string& job,
                                          const std::string& id);

class FeatureReceiver {
 public:
  // Ids that are already had, by job id: they are acknowledged and not handed out again.
  using Known = std::map<std::string, std::unordered_set<std::string>>;
  // Waits for the header, which comes with the first stored sample. `on_lost` hears of each break,
  // here and in Next.
  static absl::StatusOr<std::unique_ptr<FeatureReceiver>> Open(
      Client& client, const v1::StreamStart& start, const Known& known,
      std::function<void()> on_lost = nullptr);
  ~FeatureReceiver();

  // The first. Without hidden size and boundaries where no job has a stored sample.
  const v1::StreamHeader& header() const { return headers_.begin()->second; }
  const v1::StreamHeader& header_of(const ReceivedSample& sample) const {
    return headers_.at(sample.job_index);
  }
  // The next sample; nothing once the server has sent all. Waits; breaks are mended for as long as
  // the client's patience lasts.
  absl::StatusOr<std::optional<ReceivedSample>> Next();
  // Everything up to `sequence` is done with. Sent now, or with the next connection.
  void Ack(uint64_t sequence);
  // Ends the stream so that acknowledgements have arrived.
  absl::Status Close();
  int64_t skipped() const { return skipped_; }  // known ones
  int64_t reconnects() const { return reconnects_; }

 private:
  struct Stream;
  FeatureReceiver(Client& client, const v1::StreamStart& start, const Known& known,
                  std::function<void()> on_lost);
  absl::Status Connect();
  // After a break, of which `lost` tells: until a connection has its header, within the client's
  // patience; in its few attempts where no server was ever reached.
  absl::Status ConnectAgain(absl::Status lost);
  std::string KeyOf(const ReceivedSample& sample) const;
  // A message, or nothing at the end of the job; mends breaks.
  absl::StatusOr<bool> Read(v1::StreamFeaturesResponse& message);
  // The sample that just became complete, or nothing where it was handed out before.
  absl::StatusOr<std::optional<ReceivedSample>> Finished();
  void SendCredit(const ReceivedSample& sample);
  void SendAck();

  Client& client_;
  v1::StreamStart start_;
  std::function<void()> on_lost_;
  bool reached_ = false;                     // a server, ever
  int attempt_ = 1;                          // since a message came
  std::map<int, v1::StreamHeader> headers_;  // by job index, as they come
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<ReceivedAssembler> assembler_;
  // By job and id: sequence of every sample handed out, and 0 for those known before: after a break
  // the server sends again what it had no acknowledgement for, in an order of its own.
  std::unordered_map<std::string, uint64_t> sequences_;
  std::map<uint64_t, uint64_t>
      deliveries_;  // of this connection, not acknowledged: their sequences
  uint64_t next_sequence_ = 1;
  uint64_t acked_sequence_ = 0;
  int64_t skipped_ = 0, reconnects_ = 0;
};

}  // namespace statetap
