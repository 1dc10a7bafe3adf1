// What the system says of how much memory there is, and memory that is given back to it.
#include "sok/pages.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "check.h"
#include "files.h"
#include "sok/host_memory.h"

TEST(WholePagesOfAPartAreDropped) {
  for (const int64_t bytes : {int64_t{16384}, (int64_t{5} << 20) + 4096}) {
    char* data = static_cast<char*>(sok::AllocatePages(bytes, true, "a test"));
    std::fill(data, data + bytes, 'x');
    sok::DropPages(data + 1, bytes - 2);
    CHECK(data[0] == 'x' && data[4095] == 'x' && data[4096] == 0 && data[8192] == 0 && data[bytes - 1] == 'x');
    sok::FreePages(data, bytes);
  }
}

TEST(AProcessWithTooManyMappingsIsTold) {
  Folder folder;
  CHECK_EQ(sok::MappingsText(folder.path()), "");
  for (const char* part : {"/self", "/sys", "/sys/vm"}) mkdir((folder.path() + part).c_str(), 0700);
  std::string lines;
  for (int i = 0; i < 95; ++i) lines += "7f00-7f01 rw-p\n";
  WriteFile(folder / "self/maps", lines);
  WriteFile(folder / "sys/vm/max_map_count", "200\n");
  CHECK_EQ(sok::MappingsText(folder.path()), "");
  WriteFile(folder / "sys/vm/max_map_count", "100\n");
  CHECK_EQ(sok::MappingsText(folder.path()),
           "; this process has 95 memory mappings and may have 100: raise vm.max_map_count (sysctl -w "
           "vm.max_map_count=1048576)");
}

TEST(WhatTheSystemSaysOfMemoryIsRead) {
  Folder folder;
  auto available = [&] { return sok::AvailableBytesIn(folder.path(), folder.path()); };
  CHECK_EQ(available(), INT64_MAX);
  WriteFile(folder / "meminfo", "MemTotal:   24000 kB\nMemFree:    100 kB\nMemAvailable:   8000 kB\n");
  CHECK_EQ(available(), 8000 << 10);
  WriteFile(folder / "memory.max", "max\n");
  WriteFile(folder / "memory.current", "7000000\n");
  CHECK_EQ(available(), 8000 << 10);
  WriteFile(folder / "memory.max", "8000000\n");
  WriteFile(folder / "memory.stat", "anon 6000000\nfile 900000\ninactive_file 500000\n");
  CHECK_EQ(available(), 1500000);
  WriteFile(folder / "memory.current", "9000000\n");
  CHECK_EQ(available(), 0);
  CHECK(sok::AvailableHostBytes() > 0);
}

TEST(ALimitOfAnyGroupThatAProcessIsInCounts) {
  Folder folder;
  auto available = [&] { return sok::AvailableBytesIn(folder.path(), folder.path()); };
  for (const char* part : {"/self", "/job", "/job/step", "/memory", "/memory/job", "/memory/job/step"})
    mkdir((folder.path() + part).c_str(), 0700);
  WriteFile(folder / "meminfo", "MemAvailable: 9000 kB\n");
  WriteFile(folder / "self/cgroup", "9:name=systemd:/\n4:memory:/job/step\n0::/\n");
  CHECK_EQ(available(), 9000 << 10);
  WriteFile(folder / "memory/job/memory.limit_in_bytes", "5000\n");
  WriteFile(folder / "memory/job/memory.usage_in_bytes", "3000\n");
  WriteFile(folder / "memory/job/memory.stat", "total_inactive_file 7\n");
  CHECK_EQ(available(), 2007);
  WriteFile(folder / "self/cgroup", "0::/job/step\n");
  CHECK_EQ(available(), 9000 << 10);
  WriteFile(folder / "job/step/memory.max", "max\n");
  WriteFile(folder / "job/step/memory.current", "500\n");
  WriteFile(folder / "job/memory.max", "4000\n");
  WriteFile(folder / "job/memory.current", "600\n");
  CHECK_EQ(available(), 3400);
}
