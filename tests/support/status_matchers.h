// EXPECT_OK / ASSERT_OK, and StatusIs(code, "part of the message").
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "extractor/base/status.h"

namespace statetap::testing {

inline absl::Status StatusOf(const absl::Status& status) { return status; }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& value) {
  return value.status();
}

#define EXPECT_OK(expr) \
  EXPECT_TRUE(::statetap::testing::StatusOf(expr).ok()) << ::statetap::testing::StatusOf(expr)
#define ASSERT_OK(expr)                                                  \
  do {                                                                   \
    const absl::Status assert_ok_ = ::statetap::testing::StatusOf(expr); \
    ASSERT_TRUE(assert_ok_.ok()) << assert_ok_;                          \
  } while (false)
#define ASSERT_OK_AND_ASSIGN(lhs, expr) \
  ASSERT_OK_AND_ASSIGN_(STATETAP_CONCAT_(assert_or_, __LINE__), lhs, expr)
#define ASSERT_OK_AND_ASSIGN_(value, lhs, expr) \
  auto value = (expr);                          \
  ASSERT_TRUE(value.ok()) << value.status();    \
  lhs = *std::move(value)

MATCHER_P2(StatusIs, code, part, "") {
  const absl::Status status = StatusOf(arg);
  *result_listener << status;
  return status.code() == code && std::string(MessageOf(status)).find(part) != std::string::npos;
}

}  // namespace statetap::testing
