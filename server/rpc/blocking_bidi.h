// A bidirectional stream whose body is ordinary blocking code on a thread of its own: writes block
// until the network took the message, requests come by callback, and the stream can end at any time
// though the client still sends. (With gRPC's synchronous interface a thread that waits in Read
// would hold the end up until the client closes its side.)
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace statetap {

template <typename Request, typename Response>
class BlockingBidi final : public grpc::ServerBidiReactor<Request, Response> {
 public:
  // Called from gRPC's threads, one at a time.
  struct Handlers {
    std::function<void(const Request&)> on_request;
    std::function<void()> on_close;   // the client sends no more
    std::function<void()> on_cancel;  // the client has gone or gave up
  };
  // `body` runs on the stream's thread; what it returns ends the stream. It sets the handlers
  // before its first Start().
  using Body = std::function<grpc::Status(BlockingBidi& stream)>;

  // Deletes itself when the call is done.
  static BlockingBidi* Start(Body body) { return new BlockingBidi(std::move(body)); }

  // The next request; false when the client has closed its side or has gone. Not after Listen.
  bool Read(Request* request) {
    std::unique_lock lock(mutex_);
    reading_ = true;
    lock.unlock();
    this->StartRead(&request_);
    lock.lock();
    changed_.wait(lock, [&] { return !reading_; });
    if (read_ok_) *request = request_;
    return read_ok_;
  }
  // From now on requests go to the handlers.
  void Listen(Handlers handlers) {
    bool cancelled;
    {
      const std::lock_guard lock(mutex_);
      handlers_ = std::move(handlers);
      listening_ = true;
      cancelled = cancelled_;
    }
    if (cancelled) handlers_.on_cancel();
    this->StartRead(&request_);
  }
  // Blocks until the message was taken; false: the client has gone.
  bool Write(const Response& response) {
    std::unique_lock lock(mutex_);
    if (cancelled_) return false;
    writing_ = true;
    lock.unlock();
    this->StartWrite(&response);
    lock.lock();
    changed_.wait(lock, [&] { return !writing_; });
    return write_ok_;
  }

 private:
  explicit BlockingBidi(Body body)
      : thread_([this, body = std::move(body)] {
          const grpc::Status status = body(*this);
          {
            std::unique_lock lock(mutex_);
            finished_ = true;
            changed_.wait(lock, [&] { return !starting_read_; });
          }
          this->Finish(status);
        }) {}
  ~BlockingBidi() override = default;

  void OnReadDone(bool ok) override {
    bool listening;
    {
      const std::lock_guard lock(mutex_);
      listening = listening_;
      read_ok_ = ok;
      reading_ = false;
    }
    changed_.notify_all();
    if (!listening) return;
    if (!ok) return handlers_.on_close();
    handlers_.on_request(request_);
    {
      // No read may start once the stream ends, nor the stream end while one starts.
      const std::lock_guard lock(mutex_);
      if (finished_) return;
      starting_read_ = true;
    }
    this->StartRead(&request_);
    {
      const std::lock_guard lock(mutex_);
      starting_read_ = false;
    }
    changed_.notify_all();
  }
  void OnWriteDone(bool ok) override {
    {
      const std::lock_guard lock(mutex_);
      write_ok_ = ok;
      writing_ = false;
    }
    changed_.notify_all();
  }
  void OnCancel() override {
    bool listening;
    {
      const std::lock_guard lock(mutex_);
      cancelled_ = true;
      listening = listening_;
    }
    if (listening) handlers_.on_cancel();
  }
  void OnDone() override {
    // The thread may still be inside Finish; it touches nothing of this afterwards.
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
    delete this;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  Handlers handlers_;
  Request request_;
  bool reading_ = false, read_ok_ = false, writing_ = false, write_ok_ = false;
  bool listening_ = false, cancelled_ = false, finished_ = false, starting_read_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace statetap
