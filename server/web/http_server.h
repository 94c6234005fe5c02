// The HTTP side: /healthz for load balancers, /metrics for Prometheus, and what others answer:
// pages for people, completions for programs. A thread a connection, from a bounded number.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "extractor/base/status.h"
#include "server/web/http_message.h"

namespace httplib {
class Server;
}

namespace statetap {

class HttpServer {
 public:
  struct Health {
    bool serving;      // else 503
    std::string text;  // "ok", or what is wrong
  };
  struct Handlers {
    std::function<Health()> health;
    std::function<absl::StatusOr<std::string>()> metrics;  // text exposition format
    // GET and POST of every other path. Null: none.
    std::function<HttpReply(const HttpRequest& request)> others;
  };
  // More wait to be accepted. A client that neither sends nor reads for some seconds is cut.
  static constexpr int kMostConnections = 288;
  static constexpr size_t kMostBodyBytes = size_t{8} << 20;
  // `address`: HOST:PORT, port 0 picks one. ALREADY_EXISTS where the port is taken.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           Handlers handlers);
  ~HttpServer();
  const std::string& address() const { return address_; }  // with the port that was picked

 private:
  HttpServer(std::unique_ptr<httplib::Server> server, std::string address);
  std::unique_ptr<httplib::Server> server_;
  std::string address_;
  std::thread thread_;
};

// "host:port", an IPv6 host in brackets. INVALID_ARGUMENT says what is wrong.
struct HostPort {
  std::string host;
  int port;
};
absl::StatusOr<HostPort> ParseHostPort(const std::string& address);

}  // namespace statetap
