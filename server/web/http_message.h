// What the HTTP server hands to those who answer, and what they give back.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace statetap {

struct HttpRequest {
  std::string method, path;
  std::string target;  // path and query as they were sent
  std::multimap<std::string, std::string> query;
  std::string authorization, cookies;  // the headers' values
  std::string body;
  bool body_too_large = false;  // then it is empty

  // Empty where the query has none.
  std::string Value(const std::string& key) const {
    const auto found = query.find(key);
    return found == query.end() ? "" : found->second;
  }
};

// Where a reply goes that is not made at once.
class HttpSink {
 public:
  virtual ~HttpSink() = default;
  // Blocks while the client does not read. False: it has gone, or has read nothing for too long.
  virtual bool Write(std::string_view bytes) = 0;
  virtual bool Gone() = 0;
};

struct HttpReply {
  int status = 200;
  std::string type = "text/html; charset=utf-8";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
  // Instead of the body: writes it. False cuts the connection, so that nobody takes what came for
  // the whole. Called once, on the connection's thread.
  std::function<bool(HttpSink& sink)> write;
};

inline HttpReply RedirectTo(std::string where) {
  return {.status = 303, .type = "text/plain", .headers = {{"Location", std::move(where)}}};
}

}  // namespace statetap
