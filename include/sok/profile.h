// Where the time of a step goes: spans of this process, written as a Chrome/Perfetto trace.
//
//   const ProfileSpan span("find", table.config().name, n);
//
// While no profile runs, a span is one relaxed atomic load. While one runs, a span is written into a buffer of its own
// thread, without a lock; of a thread's spans the newest `max_spans` are kept.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace sok {

namespace profile_detail {
extern std::atomic<uint32_t> session;  // 0: no profile runs
int64_t Now();                         // nanoseconds of the monotonic clock
}  // namespace profile_detail

// What a span says beside its time; negative: nothing.
struct ProfileCounts {
  int64_t keys = -1;
  int64_t rows = -1;
  int64_t bytes = -1;

  ProfileCounts& operator+=(const ProfileCounts& other) {
    Add(other.keys, &keys);
    Add(other.rows, &rows);
    Add(other.bytes, &bytes);
    return *this;
  }

 private:
  static void Add(int64_t more, int64_t* sum) { *sum = more < 0 ? *sum : more + (*sum < 0 ? 0 : *sum); }
};

// For what is only worth working out if it is going to be recorded.
inline bool ProfileRuns() { return profile_detail::session.load(std::memory_order_relaxed) != 0; }

// The time from its construction to its destruction. A span that is open when the profile starts or stops is not
// recorded. Safe from any thread.
class ProfileSpan {
 public:
  // what: a literal. label: whose span it is, a table's name (several: separated by commas); must outlive the span.
  // label_key: what the trace calls the label; a literal.
  ProfileSpan(const char* what, const std::string& label, ProfileCounts counts = {}, const char* label_key = "table")
      : session_(profile_detail::session.load(std::memory_order_relaxed)) {
    if (session_ == 0) return;
    what_ = what;
    label_ = &label;
    label_key_ = label_key;
    counts_ = counts;
    start_ = profile_detail::Now();
  }
  ProfileSpan(const char*, const std::string&&, ProfileCounts = {}, const char* = "") = delete;
  ~ProfileSpan() {
    if (session_ != 0) Record();
  }
  ProfileSpan(const ProfileSpan&) = delete;
  ProfileSpan& operator=(const ProfileSpan&) = delete;

 private:
  void Record() const;

  const uint32_t session_;
  const char *what_, *label_key_;
  const std::string* label_;
  ProfileCounts counts_;
  int64_t start_;
};

// The two ends of something that begins on one thread and ends on another; they find each other by `label`, of which
// one may be open at a time. Costs what a span costs.
void ProfileBegin(const char* what, const std::string& label, ProfileCounts counts);
void ProfileEnd(const char* what, const std::string& label, ProfileCounts counts);

// Starts a profile that StopProfile writes to `path`; the trace shows this process as `rank`. Throws InvalidArgument if
// the file cannot be opened or max_spans is less than 1, and FailedPrecondition if a profile runs already.
void StartProfile(const std::string& path, int rank, int64_t max_spans);

struct ProfileSummary {
  int64_t spans = 0;    // in the file
  int64_t dropped = 0;  // older ones of busy threads, which are not
};

// Stops the profile and writes the file. Throws FailedPrecondition if none runs, or if the file cannot be written.
ProfileSummary StopProfile();

}  // namespace sok
