// The little of SQLite that the store needs: a connection with cached statements, bound arguments,
// rows by callback, and a transaction that rolls back unless committed. Not thread safe: the store
// guards each connection with a mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "extractor/base/status.h"

struct sqlite3;
struct sqlite3_stmt;

namespace statetap {

class SqlRow {
 public:
  explicit SqlRow(sqlite3_stmt* statement) : statement_(statement) {}
  bool IsNull(int column) const;
  int64_t Int(int column) const;
  double Real(int column) const;
  std::string Text(int column) const;
  std::span<const std::byte> Blob(int column) const;  // valid until the next row
  std::optional<double> OptionalReal(int column) const;
  std::optional<int64_t> OptionalInt(int column) const;

 private:
  sqlite3_stmt* statement_;
};

class SqlConnection {
 public:
  enum class Access { kReadWrite, kReadOnly };
  // Creates the file where it is missing (kReadWrite). Waits up to 10 s for locks of other
  // processes.
  static absl::StatusOr<SqlConnection> Open(const std::filesystem::path& path, Access access);
  SqlConnection(SqlConnection&& other) noexcept;
  SqlConnection& operator=(SqlConnection&&) = delete;
  ~SqlConnection();

  // Several statements without arguments.
  absl::Status Execute(std::string_view script);
  using OnRow = std::function<void(const SqlRow&)>;
  // One statement with `?` arguments: integers, doubles, strings, byte spans, optionals of them.
  template <typename... Args>
  absl::Status Query(std::string_view sql, const OnRow& on_row, const Args&... args) {
    STATETAP_ASSIGN_OR_RETURN(sqlite3_stmt * statement, Prepare(sql));
    int index = 0;
    (Bind(statement, ++index, args), ...);
    return Step(statement, on_row);
  }
  template <typename... Args>
  absl::Status Run(std::string_view sql, const Args&... args) {
    return Query(sql, nullptr, args...);
  }
  int64_t changes() const;  // rows that the last Run touched
  int64_t last_row() const;

 private:
  SqlConnection(sqlite3* connection, std::filesystem::path path);
  absl::StatusOr<sqlite3_stmt*> Prepare(std::string_view sql);
  absl::Status Step(sqlite3_stmt* statement, const OnRow& on_row);
  absl::Status Fault(int code) const;

  static void Bind(sqlite3_stmt* statement, int index, int64_t value);
  static void Bind(sqlite3_stmt* statement, int index, int value) {
    Bind(statement, index, int64_t{value});
  }
  static void Bind(sqlite3_stmt* statement, int index, double value);
  static void Bind(sqlite3_stmt* statement, int index, std::string_view value);
  static void Bind(sqlite3_stmt* statement, int index, const std::string& value) {
    Bind(statement, index, std::string_view(value));
  }
  static void Bind(sqlite3_stmt* statement, int index, const char* value) {
    Bind(statement, index, std::string_view(value));
  }
  static void Bind(sqlite3_stmt* statement, int index, std::span<const std::byte> value);
  static void Bind(sqlite3_stmt* statement, int index, std::nullopt_t);
  template <typename T>
  static void Bind(sqlite3_stmt* statement, int index, const std::optional<T>& value) {
    if (value) return Bind(statement, index, *value);
    Bind(statement, index, std::nullopt);
  }

  sqlite3* connection_;
  std::filesystem::path path_;
  std::map<std::string, sqlite3_stmt*, std::less<>> statements_;
};

// BEGIN IMMEDIATE … COMMIT; rolls back where Commit was not reached or failed.
class SqlTransaction {
 public:
  explicit SqlTransaction(SqlConnection& connection)
      : connection_(connection), begun_(connection.Execute("BEGIN IMMEDIATE")) {}
  ~SqlTransaction() {
    if (begun_.ok() && !done_) connection_.Execute("ROLLBACK").IgnoreError();
  }
  SqlTransaction(const SqlTransaction&) = delete;
  SqlTransaction& operator=(const SqlTransaction&) = delete;
  const absl::Status& begun() const { return begun_; }
  absl::Status Commit() {
    STATETAP_RETURN_IF_ERROR(connection_.Execute("COMMIT"));
    done_ = true;
    return absl::OkStatus();
  }

 private:
  SqlConnection& connection_;
  absl::Status begun_;
  bool done_ = false;
};

}  // namespace statetap
