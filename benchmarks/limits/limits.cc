// What the machine can do: bandwidth, random rows, and a plain kernel for each workload, written only to learn what is
// possible. It serves one job and one thread count, knows one layout, checks nothing, and is built with -march=native.
//
//   limits JOB DIM THREADS STATE      JOB: machine, w1, w2, w3; STATE: floats of optimizer state per weight (w2)
//
// Speaks the protocol of benchmarks/contestant.py on the socket SOK_BENCH_SOCKET; reads the files of
// benchmarks/workloads.py in SOK_BENCH_DATA.
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "common.h"
#include "keys.h"
#include "machine.h"
#include "tables.h"
#include "unique.h"

namespace {

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double CpuSeconds() {
  rusage r;
  getrusage(RUSAGE_SELF, &r);
  return static_cast<double>(r.ru_utime.tv_sec + r.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(r.ru_utime.tv_usec + r.ru_stime.tv_usec);
}

class Connection {
 public:
  Connection() {
    const char* path = std::getenv("SOK_BENCH_SOCKET");
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (!path || std::strlen(path) >= sizeof(address.sun_path)) Fail("SOK_BENCH_SOCKET is not set, or too long");
    std::strcpy(address.sun_path, path);
    fd_ = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) Fail("nobody listens");
  }
  void Say(const std::string& text) {
    const std::string line = text + "\n";
    for (size_t sent = 0; sent < line.size();) {
      const ssize_t n = write(fd_, line.data() + sent, line.size() - sent);
      if (n <= 0) Fail("the driver is gone");
      sent += static_cast<size_t>(n);
    }
  }
  bool Hear(std::string* line) {
    line->clear();
    for (char c; read(fd_, &c, 1) == 1;) {
      if (c == '\n') return true;
      *line += c;
    }
    return false;
  }

 private:
  int fd_;
};

std::string JsonList(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "\"" : ", \"") + name + "\"";
  return "[" + text + "]";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) Fail("limits machine|w1|w2|w3 DIM THREADS STATE");
  const std::string job = argv[1];
  const int dim = std::atoi(argv[2]), state = std::atoi(argv[4]);
  threads = std::atoi(argv[3]);
  Connection connection;
  connection.Say("{\"rank\": 0}");
  if (job == "machine") Machine();
  if (job == "w1" && dim == 16) Keys<1>();
  if (job == "w1" && dim == 64) Keys<4>();
  if (job == "w1" && dim == 128) Keys<8>();
  if (job == "w2" && state == 0) Tables<0>();
  if (job == "w2" && state == 1) Tables<1>();
  if (job == "w2" && state == 2) Tables<2>();
  if (job == "w3") Unique();
  if (steps.empty()) {
    connection.Say("{\"unsupported\": \"there is no reference kernel for this\"}");
    return 0;
  }
  connection.Say("{\"ready\": " + JsonList(order) + ", \"once\": " + JsonList(once) +
                 ", \"about\": \"plain C++ for this job alone\", \"version\": \"benchmarks/limits/limits.cc\"}");
  for (std::string line; connection.Hear(&line);) {
    std::istringstream words(line);
    std::string verb, name;
    int first = 0, count = 0;
    words >> verb >> name >> first >> count;
    if (verb == "quit" || verb.empty()) break;
    if (verb != "steps" || !steps.count(name)) {
      connection.Say(verb == "inspect" ? "{}" : "{\"error\": \"unknown command or measurement\"}");
      continue;
    }
    std::string seconds;
    const double cpu = CpuSeconds();
    for (int i = first; i < first + count; ++i) {
      const double start = Now();
      steps[name](i);
      seconds += (seconds.empty() ? "" : ", ") + std::to_string(Now() - start);
    }
    connection.Say("{\"seconds\": [" + seconds + "], \"cpu_s\": " + std::to_string(CpuSeconds() - cpu) + "}");
  }
  return 0;
}
