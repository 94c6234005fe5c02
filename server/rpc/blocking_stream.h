// Streams whose body is ordinary blocking code on a thread of its own, on gRPC's callback
// interface: writes block until the network took the message, and messages may be raw bytes.
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace statetap {

// A call that writes. `Reactor` is gRPC's base for the kind of call.
template <typename Response, typename Reactor = grpc::ServerWriteReactor<Response>>
class BlockingWriter : public Reactor {
 public:
  // `body` runs on the call's thread; what it returns ends the call. The writer deletes itself when
  // the call is done.
  static BlockingWriter* Start(std::function<grpc::Status(BlockingWriter&)> body) {
    auto* const writer = new BlockingWriter;
    writer->Run([writer, body = std::move(body)] { return body(*writer); });
    return writer;
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

 protected:
  BlockingWriter() = default;
  ~BlockingWriter() override = default;

  // Once, before the call's handler returns: gRPC ends no call before that.
  void Run(std::function<grpc::Status()> body) {
    thread_ = std::thread([this, body = std::move(body)] { this->Finish(body()); });
  }
  void OnCancel() override {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool cancelled_ = false;

 private:
  void OnWriteDone(bool ok) override {
    {
      const std::lock_guard lock(mutex_);
      write_ok_ = ok;
      writing_ = false;
    }
    changed_.notify_all();
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

  bool writing_ = false, write_ok_ = false;
  std::thread thread_;
};

// The same with requests, which come by callback, so that the call can end at any time though the
// client still sends. (With gRPC's synchronous interface a thread that waits in Read would hold the
// end up until the client closes its side.)
template <typename Request, typename Response>
class BlockingBidi final
    : public BlockingWriter<Response, grpc::ServerBidiReactor<Request, Response>> {
 public:
  // Called from gRPC's threads, one at a time.
  struct Handlers {
    std::function<void(const Request&)> on_request;
    std::function<void()> on_close;   // the client sends no more
    std::function<void()> on_cancel;  // the client has gone or gave up
  };

  // `body` sets the handlers by its first Listen().
  static BlockingBidi* Start(std::function<grpc::Status(BlockingBidi&)> body) {
    auto* const bidi = new BlockingBidi;
    bidi->Run([bidi, body = std::move(body)] {
      grpc::Status status = body(*bidi);
      std::unique_lock lock(bidi->mutex_);
      bidi->finished_ = true;
      bidi->changed_.wait(lock, [&] { return !bidi->starting_read_; });
      return status;
    });
    return bidi;
  }

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

 private:
  using Writer = BlockingWriter<Response, grpc::ServerBidiReactor<Request, Response>>;
  using Writer::cancelled_, Writer::changed_, Writer::mutex_;
  BlockingBidi() = default;
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
  void OnCancel() override {
    Writer::OnCancel();
    bool listening;
    {
      const std::lock_guard lock(mutex_);
      listening = listening_;
    }
    if (listening) handlers_.on_cancel();
  }

  Handlers handlers_;
  Request request_;
  bool reading_ = false, read_ok_ = false;
  bool listening_ = false, finished_ = false, starting_read_ = false;
};

}  // namespace statetap
