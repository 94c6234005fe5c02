#include "server/web/http_server.h"

#include <httplib.h>

#include <charconv>
#include <semaphore>
#include <utility>

namespace statetap {
namespace {

// Accepting waits for a free thread: what is not accepted takes no memory of ours.
class BoundedThreads final : public httplib::TaskQueue {
 public:
  // Nothing, or bool, as the library's version has it.
  using Enqueued = decltype(std::declval<httplib::TaskQueue&>().enqueue(nullptr));
  Enqueued enqueue(std::function<void()> serve) override {
    free_.acquire();
    return threads_.enqueue([this, serve = std::move(serve)] {
      serve();
      free_.release();
    });
  }
  void shutdown() override { threads_.shutdown(); }

 private:
  std::counting_semaphore<> free_{HttpServer::kMostConnections};
  httplib::ThreadPool threads_{HttpServer::kMostConnections};
};

class Sink final : public HttpSink {
 public:
  explicit Sink(httplib::DataSink& sink) : sink_(sink) {}
  bool Write(std::string_view bytes) override { return sink_.write(bytes.data(), bytes.size()); }
  bool Gone() override { return !sink_.is_writable(); }

 private:
  httplib::DataSink& sink_;
};

void Send(HttpReply reply, httplib::Response& response) {
  response.status = reply.status;
  // Nothing of a sample's text may run or load anything, whatever it spells.
  response.set_header("Content-Security-Policy",
                      "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; "
                      "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; "
                      "base-uri 'none'");
  response.set_header("X-Content-Type-Options", "nosniff");
  response.set_header("Cache-Control", "no-store");
  for (const auto& [name, value] : reply.headers) response.set_header(name, value);
  if (!reply.write) return response.set_content(std::move(reply.body), reply.type.c_str());
  response.set_chunked_content_provider(
      reply.type.c_str(), [write = std::move(reply.write)](size_t, httplib::DataSink& to) {
        Sink sink(to);
        if (!write(sink)) return false;
        to.done();
        return true;
      });
}

HttpRequest RequestOf(const httplib::Request& request) {
  return {.method = request.method,
          .path = request.path,
          .target = request.target,
          .query = request.params,
          .authorization = request.get_header_value("Authorization"),
          .cookies = request.get_header_value("Cookie")};
}

}  // namespace

absl::StatusOr<HostPort> ParseHostPort(const std::string& address) {
  const size_t colon = address.rfind(':');
  HostPort result{address.substr(0, colon == std::string::npos ? 0 : colon), -1};
  if (colon != std::string::npos) {
    const char* begin = address.data() + colon + 1;
    const char* end = address.data() + address.size();
    const auto [rest, error] = std::from_chars(begin, end, result.port);
    if (error != std::errc() || rest != end) result.port = -1;
  }
  if (result.host.empty() || result.port < 0 || result.port > 65535) {
    return absl::InvalidArgumentError(fmt::format(
        "\"{}\" is no HOST:PORT; for example 127.0.0.1:7070, or port 0 to have one picked",
        address));
  }
  if (result.host.front() == '[' && result.host.back() == ']')
    result.host = result.host.substr(1, result.host.size() - 2);
  return result;
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              Handlers handlers) {
  STATETAP_ASSIGN_OR_RETURN(const HostPort where, ParseHostPort(address));
  auto server = std::make_unique<httplib::Server>();
  // Without SO_REUSEPORT, which the library sets: a second server must notice the first.
  socket_t listening = INVALID_SOCKET;
  server->set_socket_options([&listening](socket_t socket) {
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    listening = socket;
  });
  server->new_task_queue = [] { return new BoundedThreads; };
  server->set_payload_max_length(kMostBodyBytes);
  server->set_tcp_nodelay(true);
  server->set_read_timeout(5, 0);
  server->set_write_timeout(30, 0);
  server->set_keep_alive_timeout(2);  // a server that ends waits for them
  server->set_keep_alive_max_count(1000);
  server->Get("/healthz", [health = std::move(handlers.health)](const httplib::Request&,
                                                                httplib::Response& response) {
    const Health now = health();
    response.status = now.serving ? 200 : 503;
    response.set_content(now.text + "\n", "text/plain");
  });
  server->Get("/metrics", [metrics = std::move(handlers.metrics)](const httplib::Request&,
                                                                  httplib::Response& response) {
    const absl::StatusOr<std::string> text = metrics();
    if (!text.ok()) response.status = 500;
    response.set_content(text.ok() ? *text : fmt::format("{}\n", MessageOf(text.status())),
                         "text/plain; version=0.0.4");
  });
  if (handlers.others) {
    server->Get(".*", [others = handlers.others](const httplib::Request& request,
                                                 httplib::Response& response) {
      Send(others(RequestOf(request)), response);
    });
    server->Post(".*", [others = std::move(handlers.others)](const httplib::Request& from,
                                                             httplib::Response& response,
                                                             const httplib::ContentReader& read) {
      HttpRequest request = RequestOf(from);
      // The rest of one that is too large is read and dropped, so that the answer is seen.
      bool& too_large = request.body_too_large;
      const bool whole = read([&](const char* bytes, size_t count) {
        too_large = too_large || request.body.size() + count > kMostBodyBytes;
        if (!too_large) request.body.append(bytes, count);
        return true;
      });
      too_large = too_large || response.status == 413;
      if (too_large) request.body.clear();
      if (whole || too_large) Send(others(request), response);  // else it ended early: 400
    });
  }
  int port = where.port;
  if (port == 0) {
    port = server->bind_to_any_port(where.host.c_str());
  } else if (!server->bind_to_port(where.host.c_str(), port)) {
    port = -1;
  }
  if (port < 0) {
    return absl::AlreadyExistsError(
        fmt::format("cannot listen on {}: the port is taken or the address is not of this machine; "
                    "give another --http, or --http \"\" for none",
                    address));
  }
  // The library lets five wait, and every further client of a burst would wait for a second.
  listen(listening, kMostConnections);
  const bool v6 = where.host.find(':') != std::string::npos;
  return std::unique_ptr<HttpServer>(new HttpServer(
      std::move(server), fmt::format("{}{}{}:{}", v6 ? "[" : "", where.host, v6 ? "]" : "", port)));
}

HttpServer::HttpServer(std::unique_ptr<httplib::Server> server, std::string address)
    : server_(std::move(server)),
      address_(std::move(address)),
      thread_([this] { server_->listen_after_bind(); }) {}

HttpServer::~HttpServer() {
  // stop() is lost on a server that has not begun to listen.
  while (!server_->is_running()) std::this_thread::yield();
  server_->stop();
  thread_.join();
}

}  // namespace statetap
