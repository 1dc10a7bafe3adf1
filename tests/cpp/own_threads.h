// Threads that a thread keeps: tests run loops and kernels by the ten thousands, and under a sanitizer to start threads for each
// takes longer than they do.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

class OwnThreads {
 public:
  // Calls body(0) here and body(1), ..., body(count - 1) in other threads, at the same time; returns when all are done.
  // Each calling thread has threads of its own: what one calls and what another does stay unordered, as a sanitizer must see.
  static void Run(int count, const std::function<void(int)>& body) {
    thread_local Owner owner;
    std::vector<std::unique_ptr<Worker>>& workers = owner.Now();
    while (static_cast<int>(workers.size()) < count - 1) workers.push_back(std::make_unique<Worker>());
    for (int i = 1; i < count; ++i) workers[static_cast<size_t>(i - 1)]->Begin(i, &body);
    if (count > 0) body(0);
    for (int i = 1; i < count; ++i) workers[static_cast<size_t>(i - 1)]->Wait();
  }

 private:
  class Worker {
   public:
    Worker() : thread_([this] { Work(); }) {}
    ~Worker() {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        is_over_ = true;
      }
      changed_.notify_all();
      thread_.join();
    }
    void Begin(int number, const std::function<void(int)>* body) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        number_ = number;
        body_ = body;
      }
      changed_.notify_all();
    }
    void Wait() {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return body_ == nullptr; });
    }

   private:
    void Work() {
      std::unique_lock<std::mutex> lock(mutex_);
      for (;;) {
        changed_.wait(lock, [this] { return body_ != nullptr || is_over_; });
        if (body_ == nullptr) return;
        lock.unlock();
        (*body_)(number_);
        lock.lock();
        body_ = nullptr;
        changed_.notify_all();
      }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    int number_ = 0;
    const std::function<void(int)>* body_ = nullptr;
    bool is_over_ = false;
    std::thread thread_;  // last: it uses the others
  };

  // A process that was forked has none of these threads: it leaves what it knows of them, and begins anew.
  struct Owner {
    std::vector<std::unique_ptr<Worker>>& Now() {
      if (pid != getpid()) Leave();
      return *workers;
    }
    void Leave() {
      static_cast<void>(workers.release());
      workers = std::make_unique<std::vector<std::unique_ptr<Worker>>>();
      pid = getpid();
    }
    ~Owner() {
      if (pid != getpid()) static_cast<void>(workers.release());
    }
    pid_t pid = getpid();
    std::unique_ptr<std::vector<std::unique_ptr<Worker>>> workers =
        std::make_unique<std::vector<std::unique_ptr<Worker>>>();
  };
};
