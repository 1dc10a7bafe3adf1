#include "sok/profile.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "sok/error.h"
#include "sok/json.h"

namespace sok {
namespace profile_detail {

std::atomic<uint32_t> session{0};

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace profile_detail

namespace {

using profile_detail::Now;
using profile_detail::session;

constexpr int64_t kBegin = -1, kEnd = -2, kMore = -3;  // in place of a duration

struct Event {
  const char *what, *label_key;
  int64_t start, duration;  // ns
  ProfileCounts counts;
  char label[72];  // 0-terminated; of a longer one, the rest is in events of duration kMore behind it
};

// The events of one thread. Its thread writes, and StopProfile reads once the session is over and `busy` is false:
// a writer sets `busy` before it looks whether its session still runs, so that one of the two sees the other.
struct Buffer {
  std::atomic<bool> busy{false};
  std::atomic<bool> owned{true};        // by a thread that lives
  std::atomic<uint32_t> of_session{0};  // whose events these are
  int64_t thread_id = 0;
  char thread_name[16] = {};
  std::unique_ptr<Event[]> events;
  int64_t capacity = 0, count = 0;  // events so far; the newest `capacity` of them are here
  int64_t spans = 0;                // those without kMore
  Buffer* next = nullptr;
};

std::atomic<Buffer*> buffers{nullptr};  // all of them; none is ever freed
std::atomic<int64_t> capacity{0};

struct Ownership {
  Buffer* buffer = nullptr;
  ~Ownership() {
    if (buffer != nullptr) buffer->owned.store(false, std::memory_order_release);
  }
};
thread_local Ownership mine;

// A buffer that a thread has left behind, unless its events are still to be written; else a new one, or null.
Buffer* Acquire(uint32_t now) {
  for (Buffer* b = buffers.load(std::memory_order_acquire); b != nullptr; b = b->next) {
    bool free = false;
    if (!b->owned.compare_exchange_strong(free, true, std::memory_order_acq_rel)) continue;
    if (b->of_session.load(std::memory_order_relaxed) != now) return b;
    b->owned.store(false, std::memory_order_release);
  }
  Buffer* b = new (std::nothrow) Buffer;
  if (b == nullptr) return nullptr;
  b->next = buffers.load(std::memory_order_relaxed);
  while (!buffers.compare_exchange_weak(b->next, b, std::memory_order_acq_rel)) {
  }
  return b;
}

// Makes the buffer ready for the first event that this thread has in session `now`.
void Begin(Buffer* b, uint32_t now) {
  const int64_t wanted = capacity.load(std::memory_order_relaxed);
  if (b->capacity != wanted) {
    b->events.reset(new (std::nothrow) Event[wanted]);  // memory that nothing is written to is never there
    b->capacity = b->events == nullptr ? 0 : wanted;
  }
  b->count = b->spans = 0;
  b->thread_id = syscall(SYS_gettid);
  pthread_getname_np(pthread_self(), b->thread_name, sizeof(b->thread_name));
  b->of_session.store(now, std::memory_order_relaxed);
}

void Write(uint32_t of, const char* what, const char* label_key, const std::string& label, ProfileCounts counts,
           int64_t start, int64_t duration) {
  if (mine.buffer == nullptr) mine.buffer = Acquire(of);
  Buffer* b = mine.buffer;
  if (b == nullptr) return;  // no memory: nothing to remember it in
  b->busy.store(true, std::memory_order_seq_cst);
  if (session.load(std::memory_order_seq_cst) == of) {
    if (b->of_session.load(std::memory_order_relaxed) != of) Begin(b, of);
    ++b->spans;
    constexpr size_t kPart = sizeof(Event::label) - 1;
    for (size_t at = 0; b->capacity > 0 && (at == 0 || at < label.size()); at += kPart) {
      Event& event = b->events[b->count++ % b->capacity];
      event = {what, label_key, start, at == 0 ? duration : kMore, counts, {}};
      std::memcpy(event.label, label.data() + at, std::min(label.size() - at, kPart));
    }
  }
  b->busy.store(false, std::memory_order_release);
}

// The running profile.
struct Profile {
  std::string path;
  FILE* file = nullptr;
  int rank = 0;
  int64_t wall_ns = 0, start_ns = 0;
};
std::mutex profile_mutex;
Profile profile;
uint32_t last_session = 0;

struct Recorded {
  Event event;
  std::string label;  // the whole of it
  int64_t thread_id;
};

// "sok/<table>/keys/0" -> "<table>"; empty for collectives that are of no table.
std::string TableOfCollective(const std::string& name) {
  if (name.rfind("sok/", 0) != 0) return "";
  size_t end = std::string::npos;
  for (const char* part : {"/keys", "/rows", "/grads"}) {
    const size_t at = name.rfind(part);
    if (at != std::string::npos && at >= 4) end = std::min(end, at);
  }
  return end == std::string::npos ? "" : name.substr(4, end - 4);
}

std::string TableOf(const Recorded& of) {
  if (std::strcmp(of.event.label_key, "table") == 0) return of.label;
  return std::strcmp(of.event.label_key, "collective") == 0 ? TableOfCollective(of.label) : "";
}

// The first table that an event is of: of collectives "<table>[+<number of further ones>][/ahead<number>]", a '+' in its
// name doubled; of others "<table>[,<table>]...".
std::string FirstTableOf(const Recorded& of) {
  std::string table = TableOf(of);
  if (std::strcmp(of.event.label_key, "table") == 0) return table.substr(0, table.find(','));
  const auto cut_number_after = [&](const std::string& mark) {
    const size_t digits = table.find_last_not_of("0123456789") + 1;
    const bool is_marked =
        digits < table.size() && digits >= mark.size() && table.compare(digits - mark.size(), mark.size(), mark) == 0;
    if (is_marked) table.resize(digits - mark.size());
    return is_marked;
  };
  cut_number_after("/ahead");
  const std::string whole = table;
  if (cut_number_after("+")) {
    const size_t pluses = table.size() - (table.find_last_not_of('+') + 1);
    if (pluses % 2 != 0) table = whole;  // with that one they are pairs: all are of the name
  }
  for (size_t at = 0; (at = table.find("++", at)) != std::string::npos; ++at) table.erase(at, 1);
  return table;
}

// Which step each event belongs to: how many updates its table had before. What has no table belongs to the step of the
// forward or backward work before it, whose results it needs.
class Steps {
 public:
  int64_t Of(const Recorded& recorded) {
    const std::string tables = TableOf(recorded);
    if (tables.empty()) return latest_;
    const int64_t step = updates_[FirstTableOf(recorded)];
    if (std::strcmp(recorded.event.what, "update") != 0) return latest_ = step;
    std::istringstream names(tables);
    for (std::string name; std::getline(names, name, ',');) ++updates_[name];
    return step;
  }

 private:
  std::map<std::string, int64_t> updates_;
  int64_t latest_ = 0;
};

class Writer {
 public:
  Writer(FILE* file, int rank) : file_(file), rank_(rank) {}

  void Thread(int64_t id, const char* name) {
    Open("thread_name", "M", id);
    std::fprintf(file_, ", \"args\": {\"name\": %s}}", JsonText(name).c_str());
  }
  void Process() {
    Open("process_name", "M", 0);
    std::fprintf(file_, ", \"args\": {\"name\": \"rank %d\"}}", rank_);
    Open("process_sort_index", "M", 0);
    std::fprintf(file_, ", \"args\": {\"sort_index\": %d}}", rank_);
  }
  void Span(const Recorded& of, int64_t step) {
    Open(of.event.what, "X", of.thread_id);
    Time("ts", of.event.start);
    Time("dur", of.event.duration);
    Args(of, step);
  }
  // Begin and end of what may overlap others: async events, which viewers show on tracks of their own.
  void Async(const Recorded& begin, const Recorded& end, int64_t id, int64_t step) {
    for (const Recorded* side : {&begin, &end}) {
      Open(begin.event.what, side == &begin ? "b" : "e", side->thread_id);
      std::fprintf(file_, ", \"cat\": \"collective\", \"id2\": {\"local\": \"0x%" PRIx64 "\"}", id);
      Time("ts", side->event.start);
      Args(*side, step);
    }
  }

 private:
  void Open(const char* name, const char* phase, int64_t thread_id) {
    std::fprintf(file_, "%s\n{\"name\": %s, \"ph\": \"%s\", \"pid\": %d, \"tid\": %" PRId64, is_first_ ? "" : ",",
                 JsonText(name).c_str(), phase, rank_, thread_id);
    is_first_ = false;
  }
  void Time(const char* key, int64_t ns) {
    std::fprintf(file_, ", \"%s\": %" PRId64 ".%03d", key, ns / 1000, static_cast<int>(ns % 1000));
  }
  void Args(const Recorded& of, int64_t step) {
    const Event& event = of.event;
    std::fprintf(file_, ", \"args\": {\"step\": %" PRId64, step);
    const std::string table = TableOf(of);
    if (!table.empty()) std::fprintf(file_, ", \"table\": %s", JsonText(table).c_str());
    if (std::strcmp(event.label_key, "table") != 0) {
      std::fprintf(file_, ", \"%s\": %s", event.label_key, JsonText(of.label).c_str());
    }
    if (event.counts.keys >= 0) std::fprintf(file_, ", \"keys\": %" PRId64, event.counts.keys);
    if (event.counts.rows >= 0) std::fprintf(file_, ", \"rows\": %" PRId64, event.counts.rows);
    if (event.counts.bytes >= 0) std::fprintf(file_, ", \"bytes\": %" PRId64, event.counts.bytes);
    std::fprintf(file_, "}}");
  }

  FILE* const file_;
  const int rank_;
  bool is_first_ = true;
};

ProfileSummary WriteTrace(const Profile& of, std::vector<Recorded> events,
                          const std::map<int64_t, std::string>& threads, int64_t dropped) {
  // By time, and what holds others before them.
  std::stable_sort(events.begin(), events.end(), [](const Recorded& a, const Recorded& b) {
    return a.event.start != b.event.start ? a.event.start < b.event.start : a.event.duration > b.event.duration;
  });
  ProfileSummary summary;
  summary.dropped = dropped;
  std::fprintf(of.file, "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [");
  Writer writer(of.file, of.rank);
  writer.Process();
  for (const auto& [id, name] : threads) writer.Thread(id, name.c_str());
  Steps steps;
  std::map<std::string, std::pair<const Recorded*, int64_t>> open;
  for (const Recorded& recorded : events) {
    if (recorded.event.duration == kEnd) {
      const auto begun = open.find(recorded.label);
      if (begun == open.end()) continue;  // it began before the profile, or its beginning was dropped
      writer.Async(*begun->second.first, recorded, ++summary.spans, begun->second.second);
      open.erase(begun);
      continue;
    }
    const int64_t step = steps.Of(recorded);
    if (recorded.event.duration == kBegin) {
      open[recorded.label] = {&recorded, step};
    } else {
      writer.Span(recorded, step);
      ++summary.spans;
    }
  }
  std::fprintf(of.file,
               "\n], \"otherData\": {\"rank\": %d, \"process_id\": %d, \"spans\": %" PRId64
               ", \"dropped_spans\": %" PRId64 ", \"started_at_unix_seconds\": %.3f, \"started_at_ts\": %" PRId64
               "}}\n",
               of.rank, static_cast<int>(getpid()), summary.spans, summary.dropped,
               static_cast<double>(of.wall_ns) / 1e9, of.start_ns / 1000);
  return summary;
}

}  // namespace

void ProfileSpan::Record() const { Write(session_, what_, label_key_, *label_, counts_, start_, Now() - start_); }

void ProfileBegin(const char* what, const std::string& label, ProfileCounts counts) {
  const uint32_t now = session.load(std::memory_order_relaxed);
  if (now != 0) Write(now, what, "collective", label, counts, Now(), kBegin);
}

void ProfileEnd(const char* what, const std::string& label, ProfileCounts counts) {
  const uint32_t now = session.load(std::memory_order_relaxed);
  if (now != 0) Write(now, what, "collective", label, counts, Now(), kEnd);
}

void StartProfile(const std::string& path, int rank, int64_t max_spans) {
  if (max_spans < 1 || max_spans > (int64_t{1} << 32)) {
    throw InvalidArgument("`max_spans` must lie in [1, 2^32]. Received: " + std::to_string(max_spans) + ".");
  }
  const std::lock_guard<std::mutex> lock(profile_mutex);
  if (profile.file != nullptr) {
    throw FailedPrecondition("A profile runs already, into '" + profile.path +
                             "'; a process has one at a time. End that one first.");
  }
  FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) {
    throw InvalidArgument("`path` must be a file that can be written. Received: '" + path +
                          "': " + std::strerror(errno) + ".");
  }
  profile = {
      path, file, rank,
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count(),
      Now()};
  capacity.store(max_spans, std::memory_order_relaxed);
  if (++last_session == 0) ++last_session;
  session.store(last_session, std::memory_order_seq_cst);
}

ProfileSummary StopProfile() {
  const std::lock_guard<std::mutex> lock(profile_mutex);
  if (profile.file == nullptr) throw FailedPrecondition("No profile runs.");
  const uint32_t ended = session.exchange(0, std::memory_order_seq_cst);
  std::vector<Recorded> events;
  std::map<int64_t, std::string> threads;
  int64_t dropped = 0;
  for (Buffer* b = buffers.load(std::memory_order_acquire); b != nullptr; b = b->next) {
    while (b->busy.load(std::memory_order_seq_cst)) std::this_thread::yield();
    if (b->of_session.load(std::memory_order_relaxed) != ended) continue;
    const int64_t kept = std::min(b->count, b->capacity);
    const size_t before = events.size();
    threads[b->thread_id] = b->thread_name;
    for (int64_t i = b->count - kept; i < b->count; ++i) {
      const Event& event = b->events[i % b->capacity];
      if (event.duration != kMore) {
        events.push_back({event, event.label, b->thread_id});
      } else if (events.size() > before) {  // else the oldest span has lost its head
        events.back().label += event.label;
      }
    }
    dropped += b->spans - static_cast<int64_t>(events.size() - before);
  }
  const Profile done = std::exchange(profile, {});
  const ProfileSummary summary = WriteTrace(done, std::move(events), threads, dropped);
  const bool failed = std::ferror(done.file) != 0;
  if (std::fclose(done.file) != 0 || failed) {
    throw FailedPrecondition("The profile could not be written to '" + done.path + "': " + std::strerror(errno) + ".");
  }
  return summary;
}

}  // namespace sok
