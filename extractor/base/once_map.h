// Values by key, each made once for all threads: the first one to ask for a key makes its value,
// those that ask meanwhile wait for it.
#pragma once

#include <exception>
#include <future>
#include <map>
#include <mutex>

namespace statetap {

template <typename Key, typename Value>
class OnceMap {
 public:
  // The key's value, by make() where no thread has made it yet. What make() throws reaches all that
  // wait for it; whoever asks later makes the value anew. make() may ask for other keys.
  template <typename Make>
  Value Get(const Key& key, const Make& make) {
    std::promise<Value> promise;
    std::shared_future<Value> value;
    bool first;
    {
      const std::lock_guard lock(mutex_);
      const auto [at, inserted] = values_.try_emplace(key);
      first = inserted;
      if (first) at->second = promise.get_future().share();
      value = at->second;
    }
    if (first) {
      try {
        promise.set_value(make());
      } catch (...) {
        {
          const std::lock_guard lock(mutex_);
          values_.erase(key);
        }
        promise.set_exception(std::current_exception());
      }
    }
    return value.get();
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::shared_future<Value>> values_;
};

}  // namespace statetap
