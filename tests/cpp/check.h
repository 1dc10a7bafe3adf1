// A few lines of testing: TEST(Name) { ... } with CHECK, CHECK_EQ, CHECK_THROWS. A program runs all its tests, or those of the file that
// its argument names; 0 means all passed.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

// The thread sanitizer makes all some twenty times slower, and looks at threads, not at sizes: a test of many keys takes so many times
// fewer of them there. The other sanitizers see them all.
#if defined(__SANITIZE_THREAD__)
constexpr int kFewer = 10;
#else
constexpr int kFewer = 1;
#endif

namespace check {

struct Test {
  std::string file;  // without folder and ending
  const char* name;
  void (*body)();
};

inline std::vector<Test> tests;
inline int failures = 0;

inline bool Register(const std::string& path, const char* name, void (*body)()) {
  const std::string file = path.substr(path.rfind('/') + 1);
  tests.push_back({file.substr(0, file.find('.')), name, body});
  return true;
}

inline void Fail(const char* file, int line, const std::string& text) {
  ++failures;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
}

template <class A, class B>
void Equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream message;
  message << text << ": " << a << " != " << b;
  Fail(file, line, message.str());
}

}  // namespace check

#define TEST(name)                                                                                  \
  static void name();                                                                               \
  [[maybe_unused]] static const bool name##_is_registered = check::Register(__FILE__, #name, name); \
  static void name()
#define CHECK(condition) ((condition) ? void() : check::Fail(__FILE__, __LINE__, "not true: " #condition))
#define CHECK_EQ(a, b) check::Equal(a, b, #a " == " #b, __FILE__, __LINE__)
// The statement throws Type, and its text holds `part`.
#define CHECK_THROWS(statement, Type, part)                                                                 \
  do {                                                                                                      \
    try {                                                                                                   \
      statement;                                                                                            \
      check::Fail(__FILE__, __LINE__, "did not throw " #Type ": " #statement);                              \
    } catch (const Type& e) {                                                                               \
      if (std::string(e.what()).find(part) == std::string::npos) check::Fail(__FILE__, __LINE__, e.what()); \
    }                                                                                                       \
  } while (false)

int main(int argc, char** argv) {
  int done = 0;
  for (const check::Test& test : check::tests) {
    if (argc > 1 && test.file != argv[1]) continue;
    const int before = check::failures;
    const auto began = std::chrono::steady_clock::now();
    test.body();
    const auto ms =
        std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - began).count();
    std::printf("%s %s (%lld ms)\n", check::failures == before ? "ok    " : "FAILED", test.name,
                static_cast<long long>(ms));
    ++done;
  }
  return check::failures == 0 && done > 0 ? 0 : 1;
}
