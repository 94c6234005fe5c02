// A hop between client and server on one machine: forwards TCP until it is frozen. Then nothing
// arrives any more on either side and nothing ends, as when a machine or a route vanishes.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace statetap::testing {

class Proxy {
 public:
  explicit Proxy(const std::string& server)
      : server_(At(static_cast<uint16_t>(std::stoi(server.substr(server.rfind(':') + 1))))) {
    sockaddr_in here = At(0);
    socklen_t size = sizeof(here);
    bind(listening_, reinterpret_cast<sockaddr*>(&here), size);
    listen(listening_, 16);
    getsockname(listening_, reinterpret_cast<sockaddr*>(&here), &size);
    address_ = "127.0.0.1:" + std::to_string(ntohs(here.sin_port));
    thread_ = std::thread([this] { Forward(); });
  }
  ~Proxy() {
    Freeze();
    for (const auto& [from, to] : other_) close(from);
  }
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  const std::string& address() const { return address_; }
  // Connections stay as they are; new ones are refused.
  void Freeze() {
    frozen_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  static sockaddr_in At(uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    return address;
  }
  void Connect() {
    const int client = accept(listening_, nullptr, nullptr);
    const int server = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(server, reinterpret_cast<const sockaddr*>(&server_), sizeof(server_)) != 0) {
      close(server);
      close(client);
      return;
    }
    other_[client] = server;
    other_[server] = client;
  }
  void End(int from) {
    const int to = other_.at(from);
    for (const int each : {from, to}) {
      close(each);
      other_.erase(each);
    }
  }
  void Forward() {
    std::array<char, 65536> bytes;
    while (!frozen_) {
      std::vector<pollfd> ready = {{listening_, POLLIN, 0}};
      for (const auto& [from, to] : other_) ready.push_back({from, POLLIN, 0});
      poll(ready.data(), ready.size(), /*timeout=*/20);
      if (ready[0].revents != 0) Connect();
      for (const pollfd& each : ready) {
        if (each.revents == 0 || !other_.contains(each.fd)) continue;
        const ssize_t count = read(each.fd, bytes.data(), bytes.size());
        if (count <= 0 || send(other_.at(each.fd), bytes.data(), static_cast<size_t>(count),
                               MSG_NOSIGNAL) != count)
          End(each.fd);
      }
    }
    close(listening_);
  }

  const sockaddr_in server_;
  const int listening_ = socket(AF_INET, SOCK_STREAM, 0);
  std::string address_;
  std::atomic<bool> frozen_{false};
  std::map<int, int> other_;  // ends of a connection: each one's other; the thread's
  std::thread thread_;
};

}  // namespace statetap::testing
