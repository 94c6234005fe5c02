// The parts of a configuration with rules of their own: rotary positions and quantisation.
#pragma once

#include "extractor/checkpoint/config_reader.h"
#include "extractor/checkpoint/model_config.h"

namespace statetap {

// From rope_theta and rope_scaling (raw files) or rope_parameters (transformers 5). Both with the
// same content are fine. Types other than YaRN and none are faults.
RopeConfig ReadRope(ConfigReader& reader);

// Notes a fault unless there is no quantization_config or it is compressed-tensors pack-quantized
// INT4, symmetric, groups of 32, weights only. The inner block counts; an outer copy has to be as
// supported.
void CheckQuantization(ConfigReader& reader);

}  // namespace statetap
