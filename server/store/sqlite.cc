#include "server/store/sqlite.h"

#include <sqlite3.h>

#include <utility>

namespace statetap {

bool SqlRow::IsNull(int column) const {
  return sqlite3_column_type(statement_, column) == SQLITE_NULL;
}
int64_t SqlRow::Int(int column) const { return sqlite3_column_int64(statement_, column); }
double SqlRow::Real(int column) const { return sqlite3_column_double(statement_, column); }
std::string SqlRow::Text(int column) const {
  const auto bytes = Blob(column);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
std::span<const std::byte> SqlRow::Blob(int column) const {
  const auto* data = static_cast<const std::byte*>(sqlite3_column_blob(statement_, column));
  return {data, static_cast<size_t>(sqlite3_column_bytes(statement_, column))};
}
std::optional<double> SqlRow::OptionalReal(int column) const {
  return IsNull(column) ? std::nullopt : std::optional(Real(column));
}
std::optional<int64_t> SqlRow::OptionalInt(int column) const {
  return IsNull(column) ? std::nullopt : std::optional(Int(column));
}

absl::StatusOr<SqlConnection> SqlConnection::Open(const std::filesystem::path& path,
                                                  Access access) {
  sqlite3* handle = nullptr;
  const int flags = access == Access::kReadOnly ? SQLITE_OPEN_READONLY
                                                : SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
  const int code =
      sqlite3_open_v2(path.c_str(), &handle, flags | SQLITE_OPEN_NOMUTEX, /*vfs=*/nullptr);
  SqlConnection connection(handle, path);
  if (code != SQLITE_OK) return connection.Fault(code);
  sqlite3_extended_result_codes(handle, 1);
  sqlite3_busy_timeout(handle, /*ms=*/10000);
  return connection;
}

SqlConnection::SqlConnection(sqlite3* connection, std::filesystem::path path)
    : connection_(connection), path_(std::move(path)) {}

SqlConnection::SqlConnection(SqlConnection&& other) noexcept
    : connection_(std::exchange(other.connection_, nullptr)),
      path_(std::move(other.path_)),
      statements_(std::move(other.statements_)) {
  other.statements_.clear();
}

SqlConnection::~SqlConnection() {
  for (const auto& [sql, statement] : statements_) sqlite3_finalize(statement);
  sqlite3_close(connection_);
}

absl::Status SqlConnection::Fault(int code) const {
  const int primary = code & 0xff;
  const char* detail = connection_ != nullptr ? sqlite3_errmsg(connection_) : sqlite3_errstr(code);
  const std::string text = fmt::format("{}: {} (SQLite code {})", path_.string(), detail, code);
  if (primary == SQLITE_FULL)
    return absl::ResourceExhaustedError(text + "; free space on the disk of --data");
  if (primary == SQLITE_CANTOPEN || primary == SQLITE_READONLY || primary == SQLITE_PERM)
    return absl::PermissionDeniedError(text +
                                       "; --data must be a folder that the server can write");
  if (primary == SQLITE_CORRUPT || primary == SQLITE_NOTADB) return absl::DataLossError(text);
  return absl::InternalError(text);
}

absl::Status SqlConnection::Execute(std::string_view script) {
  const int code =
      sqlite3_exec(connection_, std::string(script).c_str(), nullptr, nullptr, nullptr);
  return code == SQLITE_OK ? absl::OkStatus() : Fault(code);
}

absl::StatusOr<sqlite3_stmt*> SqlConnection::Prepare(std::string_view sql) {
  if (const auto found = statements_.find(sql); found != statements_.end()) return found->second;
  sqlite3_stmt* statement = nullptr;
  const int code = sqlite3_prepare_v3(connection_, sql.data(), static_cast<int>(sql.size()),
                                      SQLITE_PREPARE_PERSISTENT, &statement, nullptr);
  if (code != SQLITE_OK) return Fault(code);
  statements_.emplace(sql, statement);
  return statement;
}

absl::Status SqlConnection::Step(sqlite3_stmt* statement, const OnRow& on_row) {
  int code;
  while ((code = sqlite3_step(statement)) == SQLITE_ROW) {
    if (on_row) on_row(SqlRow(statement));
  }
  const absl::Status status = code == SQLITE_DONE ? absl::OkStatus() : Fault(code);
  sqlite3_reset(statement);
  sqlite3_clear_bindings(statement);
  return status;
}

int64_t SqlConnection::changes() const { return sqlite3_changes64(connection_); }
int64_t SqlConnection::last_row() const { return sqlite3_last_insert_rowid(connection_); }

void SqlConnection::Bind(sqlite3_stmt* statement, int index, int64_t value) {
  sqlite3_bind_int64(statement, index, value);
}
void SqlConnection::Bind(sqlite3_stmt* statement, int index, double value) {
  sqlite3_bind_double(statement, index, value);
}
void SqlConnection::Bind(sqlite3_stmt* statement, int index, std::string_view value) {
  // A null pointer would bind NULL, and an empty view may have one.
  sqlite3_bind_text64(statement, index, value.empty() ? "" : value.data(), value.size(),
                      SQLITE_STATIC, SQLITE_UTF8);
}
void SqlConnection::Bind(sqlite3_stmt* statement, int index, std::span<const std::byte> value) {
  sqlite3_bind_blob64(statement, index, value.empty() ? "" : static_cast<const void*>(value.data()),
                      value.size(), SQLITE_STATIC);
}
void SqlConnection::Bind(sqlite3_stmt* statement, int index, std::nullopt_t) {
  sqlite3_bind_null(statement, index);
}

}  // namespace statetap
