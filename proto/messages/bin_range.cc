#include "proto/messages/bin_range.h"

#include <algorithm>

namespace statetap {
namespace {

class UsedBins {
 public:
  void Add(const google::protobuf::RepeatedField<int64_t>& bins, int from) {
    for (int bin = from; bin < bins.size(); ++bin) {
      if (bins[bin] == 0) continue;
      first_ = std::min(first_, bin);
      last_ = std::max(last_, bin);
    }
  }
  BinRange Range(double (*edge)(int)) const {
    return last_ < 0 ? BinRange{} : BinRange{edge(first_), edge(last_ + 1)};
  }

 private:
  int first_ = 1 << 20, last_ = -1;
};

}  // namespace

BinRange RmsRangeOf(const v1::Statistics& statistics) {
  UsedBins used;
  for (const v1::BoundaryStatistics& boundary : statistics.boundaries())
    used.Add(boundary.row_rms_bins(), 1);
  return used.Range(RmsEdge);
}

BinRange LengthRangeOf(const v1::Statistics& statistics) {
  UsedBins used;
  for (const v1::SourceReport& source : statistics.sources()) {
    used.Add(source.prompt_length_bins(), 0);
    used.Add(source.answer_length_bins(), 0);
  }
  return used.Range(LengthEdge);
}

}  // namespace statetap
