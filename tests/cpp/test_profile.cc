#include "sok/profile.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "sok/error.h"
#include "threads.h"

namespace {

const std::string kPath = "test_profile.json";
const std::string kTable = "item";

std::string Written() {
  std::ifstream file(kPath);
  std::stringstream text;
  text << file.rdbuf();
  std::remove(kPath.c_str());
  return text.str();
}

int64_t Count(const std::string& text, const std::string& part) {
  int64_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

void Spans(int n) {
  for (int i = 0; i < n; ++i) const sok::ProfileSpan span("find", kTable, {i});
}

}  // namespace

TEST(SpansAreWrittenWithThreadTableAndCounts) {
  sok::StartProfile(kPath, 3, 100);
  {
    const sok::ProfileSpan outer("find", kTable, {7, 5, 640});
    const sok::ProfileSpan inner("combine", kTable);
  }
  const sok::ProfileSummary summary = sok::StopProfile();
  CHECK_EQ(summary.spans, 2);
  CHECK_EQ(summary.dropped, 0);
  const std::string text = Written();
  CHECK(text.find("\"args\": {\"step\": 0, \"table\": \"item\", \"keys\": 7, \"rows\": 5, \"bytes\": 640}") !=
        std::string::npos);
  CHECK(text.find("\"args\": {\"step\": 0, \"table\": \"item\"}") != std::string::npos);
  CHECK(text.find("\"pid\": 3, \"tid\": " + std::to_string(syscall(SYS_gettid))) != std::string::npos);
  CHECK(text.find("\"name\": \"rank 3\"") != std::string::npos);
  CHECK(text.find("\"find\"") < text.find("\"combine\""));  // what holds another comes before it
}

TEST(WithoutAProfileNothingIsRecorded) {
  Spans(10);
  sok::ProfileSpan* open = new sok::ProfileSpan("find", kTable);
  sok::StartProfile(kPath, 0, 100);
  delete open;  // began too early
  open = new sok::ProfileSpan("find", kTable);
  CHECK_EQ(sok::StopProfile().spans, 0);
  delete open;  // ended too late
  Written();
  sok::StartProfile(kPath, 0, 100);
  CHECK_EQ(sok::StopProfile().spans, 0);
  CHECK(Written().find("\"dropped_spans\": 0") != std::string::npos);
}

TEST(TheOldestSpansOfAThreadAreDroppedAndCounted) {
  sok::StartProfile(kPath, 0, 4);
  Spans(10);
  std::thread([] { Spans(3); }).join();
  const sok::ProfileSummary summary = sok::StopProfile();
  CHECK_EQ(summary.spans, 4 + 3);
  CHECK_EQ(summary.dropped, 6);
  const std::string text = Written();
  CHECK(text.find("\"keys\": 9}") != std::string::npos && text.find("\"keys\": 5}") == std::string::npos);
  CHECK(text.find("\"dropped_spans\": 6") != std::string::npos);
}

void Span(const char* what, const std::string& label, const char* key = "table") {
  const sok::ProfileSpan span(what, label, {}, key);
}

TEST(StepsAreCountedByTheUpdatesOfATable) {
  const std::string other = "user", both = "item,user", op = "node";
  sok::StartProfile(kPath, 0, 100);
  for (int step = 0; step < 3; ++step) {
    Span("find", both);
    Span("combine", op, "op");
    Span("update", kTable);
    Span("backward", op, "op");  // of the other table, whose update is still to come
    Span("update", other);
  }
  for (int step = 3; step < 5; ++step) {  // both in one update, as a group has it
    Span("find", kTable);
    Span("find", other);
    Span("combine", op, "op");
    Span("backward", op, "op");
    Span("update", both);
  }
  sok::StopProfile();
  const std::string text = Written();
  for (int step = 0; step < 5; ++step) CHECK_EQ(Count(text, "{\"step\": " + std::to_string(step) + ","), 5);
}

TEST(CountsOfAGroupAddUp) {
  sok::ProfileCounts sum;
  sum += {-1, 3, 5};
  sum += {-1, 4, -1};
  CHECK_EQ(sum.keys, -1);
  CHECK_EQ(sum.rows, 7);
  CHECK_EQ(sum.bytes, 5);
}

TEST(ExchangesOfSeveralTablesBelongToTheStepsOfTheirFirst) {
  sok::StartProfile(kPath, 0, 100);
  const std::vector<std::string> updated = {"a,b", "a,b", "a+7,b", "a+7"};
  for (const std::string& tables : updated) const sok::ProfileSpan span("update", tables);
  for (const char* of : {"sok/a+1/keys/0", "sok/a+1/ahead0/keys/7", "sok/a++7+1/rows/0", "sok/a++7/grads/0"}) {
    sok::ProfileBegin("exchange", std::string(of), {});
    sok::ProfileEnd("", std::string(of), {});
  }
  sok::StopProfile();
  const std::string text = Written();
  for (const char* what : {"\"a+1\", \"collective\"", "\"a+1/ahead0\"", "\"a++7+1\"", "\"a++7\""}) {
    CHECK_EQ(Count(text, "\"step\": 2, \"table\": " + std::string(what)), 2);
  }
}

TEST(BeginAndEndMayBeOnTwoThreadsAndFindEachOther) {
  const std::string keys = "sok/item/keys/0", rows = "sok/a/b/rows", dense = "sok/dense_gradients/0";
  sok::StartProfile(kPath, 0, 100);
  sok::ProfileEnd("", rows, {});  // began before
  sok::ProfileBegin("exchange", keys, {-1, -1, 80});
  sok::ProfileBegin("exchange", rows, {});
  sok::ProfileBegin("collective", dense, {});
  std::thread([&] { sok::ProfileEnd("", keys, {-1, -1, 60}); }).join();
  sok::ProfileEnd("", rows, {});
  CHECK_EQ(sok::StopProfile().spans, 2);  // dense has not ended
  const std::string text = Written();
  CHECK_EQ(Count(text, "\"ph\": \"b\""), 2);
  CHECK_EQ(Count(text, "\"ph\": \"e\""), 2);
  CHECK_EQ(Count(text, "\"table\": \"item\", \"collective\": \"sok/item/keys/0\", \"bytes\": 80"), 1);
  CHECK_EQ(Count(text, "\"table\": \"item\", \"collective\": \"sok/item/keys/0\", \"bytes\": 60"), 1);
  CHECK_EQ(Count(text, "\"table\": \"a/b\""), 2);
}

TEST(LongNamesAreKeptWhole) {
  std::string name = "x";
  for (int i = 0; i < 200; ++i) name += "\xC3\xA9";
  for (const int64_t max_spans : {100, 6, 5}) {  // a name of 401 bytes takes six places
    sok::StartProfile(kPath, 0, max_spans);
    {
      const sok::ProfileSpan span("find", name);
    }
    const sok::ProfileSummary summary = sok::StopProfile();
    CHECK_EQ(summary.spans, max_spans < 6 ? 0 : 1);
    CHECK_EQ(summary.dropped, max_spans < 6 ? 1 : 0);
    CHECK_EQ(Count(Written(), "\"table\": \"" + name + "\""), summary.spans);
  }
}

TEST(ManyThreadsRecordWhileProfilesStartAndStop) {
  std::atomic<bool> done{false};
  std::thread profiler([&] {
    for (int i = 0; i < 50; ++i) {
      sok::StartProfile(kPath, 0, 64);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      sok::StopProfile();
    }
    done = true;
  });
  RunTogether(3, [&](int) {
    while (!done) std::thread([] { Spans(100); }).join();  // threads come and go
  });
  profiler.join();
  sok::StartProfile(kPath, 0, 1000);
  RunTogether(4, [](int) { Spans(500); });
  const sok::ProfileSummary summary = sok::StopProfile();
  CHECK_EQ(summary.spans, 2000);
  CHECK_EQ(summary.dropped, 0);
  Written();
}

TEST(WhatCannotStartOrStopSaysWhy) {
  CHECK_THROWS(sok::StartProfile("no/such/folder/x.json", 0, 10), sok::InvalidArgument,
               "'no/such/folder/x.json': No such file or directory");
  CHECK_THROWS(sok::StartProfile(kPath, 0, 0), sok::InvalidArgument, "`max_spans` must lie in");
  CHECK_THROWS(sok::StopProfile(), sok::FailedPrecondition, "No profile runs");
  sok::StartProfile(kPath, 0, 10);
  CHECK_THROWS(sok::StartProfile("other.json", 0, 10), sok::FailedPrecondition,
               "runs already, into 'test_profile.json'");
  sok::StopProfile();
  Written();
  sok::StartProfile("/dev/full", 0, 10);
  CHECK_THROWS(sok::StopProfile(), sok::FailedPrecondition, "'/dev/full': No space left");
}

// Sanitizers make everything slow.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(SpansCostLittleWhenOffAndNotMuchWhenOn) {
  const auto best_ns = [](int64_t n) {
    double best = 1e9;
    for (int repeat = 0; repeat < 30; ++repeat) {
      const auto start = std::chrono::steady_clock::now();
      Spans(static_cast<int>(n));
      const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
      best = std::min(best, taken.count() / static_cast<double>(n));
    }
    return best;
  };
  const double off = best_ns(10000);
  sok::StartProfile(kPath, 0, 1000);
  const double on = best_ns(1000);
  sok::StopProfile();
  Written();
  std::printf("a span takes %.1f ns when off, %.0f ns when on\n", off, on);
  CHECK(off < 50);
  CHECK(on < 5000);
}
#endif
