// A wire with a latency: packets that a host writes to its TUN device reach the other host's so much later, in order.
//
// forward NANOSECONDS DEVICE PID PID...   makes DEVICE in the network namespace of each process and forwards among them, by the
// last byte of IPv4 addresses: the n-th process has n. Says "ready"; each line of its standard input is another latency from
// then on, and it ends with that.
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

namespace {

constexpr size_t kMost = 65535;   // bytes of a packet
constexpr size_t kQueued = 4096;  // packets on the way to one host; more are lost, as in a switch

struct Packet {
  int64_t due;
  std::vector<char> bytes;
};

struct Port {
  int fd = -1;
  std::deque<Packet> coming;
};

int64_t Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "forward: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

int MakeDevice(const std::string& pid, const char* name) {
  const std::string path = "/proc/" + pid + "/ns/net";
  const int space = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (space < 0 || setns(space, CLONE_NEWNET) != 0) Fail(path);
  close(space);
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) Fail("/dev/net/tun");
  ifreq request = {};
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  if (ioctl(fd, TUNSETIFF, &request) != 0) Fail("TUNSETIFF");
  return fd;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: forward NANOSECONDS DEVICE PID PID...\n");
    return 2;
  }
  int64_t latency = std::atoll(argv[1]);
  std::vector<Port> ports(static_cast<size_t>(argc - 3));
  for (size_t i = 0; i < ports.size(); ++i) ports[i].fd = MakeDevice(argv[i + 3], argv[2]);
  prctl(PR_SET_TIMERSLACK, 1);  // else a wait of 100 us takes 150
  std::puts("ready");
  std::fflush(stdout);

  std::vector<pollfd> files;
  std::vector<std::vector<char>> spare;
  for (;;) {
    files.assign(1, {STDIN_FILENO, POLLIN, 0});
    int64_t next = -1;
    for (const Port& port : ports) {
      files.push_back({port.fd, POLLIN, 0});
      if (!port.coming.empty() && (next < 0 || port.coming.front().due < next)) next = port.coming.front().due;
    }
    timespec wait = {};
    if (next >= 0) {
      const int64_t left = std::max<int64_t>(next - Now(), 0);
      wait = {static_cast<time_t>(left / 1000000000), static_cast<long>(left % 1000000000)};
    }
    if (ppoll(files.data(), files.size(), next < 0 ? nullptr : &wait, nullptr) < 0 && errno != EINTR) Fail("poll");
    if ((files[0].revents & (POLLIN | POLLHUP)) != 0) {
      char line[64] = {};  // one at a time: whoever writes waits for "ready"
      if (read(STDIN_FILENO, line, sizeof(line) - 1) <= 0) return 0;
      latency = std::atoll(line);
      std::puts("ready");
      std::fflush(stdout);
    }
    for (size_t i = 0; i < ports.size(); ++i) {
      // A device that is down gives errors until it is up.
      for (int some = 0; some < 64 && (files[i + 1].revents & POLLIN) != 0; ++some) {
        std::vector<char> bytes;
        if (!spare.empty()) {
          bytes.swap(spare.back());
          spare.pop_back();
        }
        bytes.resize(kMost);
        const ssize_t size = read(ports[i].fd, bytes.data(), kMost);
        const size_t to = size >= 20 && (bytes[0] & 0xF0) == 0x40 ? static_cast<unsigned char>(bytes[19]) : 0;
        if (size <= 0) {
          spare.push_back(std::move(bytes));
          break;
        }
        if (to < 1 || to > ports.size() || ports[to - 1].coming.size() >= kQueued) {
          spare.push_back(std::move(bytes));
          continue;
        }
        bytes.resize(static_cast<size_t>(size));
        ports[to - 1].coming.push_back({Now() + latency, std::move(bytes)});
      }
    }
    const int64_t now = Now();
    for (Port& port : ports) {
      while (!port.coming.empty() && port.coming.front().due <= now) {
        std::vector<char>& bytes = port.coming.front().bytes;
        if (write(port.fd, bytes.data(), bytes.size()) < 0 && errno == EAGAIN) break;
        if (spare.size() < 1024) spare.push_back(std::move(bytes));
        port.coming.pop_front();
      }
    }
  }
}
