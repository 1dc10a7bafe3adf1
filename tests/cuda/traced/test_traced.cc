// What nvcc has made, CUB's host code too, on the emulator's runtime: kernels are started, and do not run. Each launch is looked at
// (launches.cc), and each call fails in turn.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>

#include "check.h"
#include "fault_cases.h"
#include "launches.h"
#include "sok/device_words.h"

namespace {

void Check(bool is_so, const Operation& operation, int64_t k, const char* what) {
  if (!is_so) check::Fail(__FILE__, __LINE__, operation.name + (", call " + std::to_string(k) + ": ") + what);
}

}  // namespace

TEST(EveryLaunchIsSound) {
  for (const Operation& operation : Operations()) {
    Fixture fixture;
    const Launches before = LaunchesSoFar();
    operation.run(&fixture);
    const Launches after = LaunchesSoFar();
    std::printf("%s: %lld launches, and %lld of CUB\n", operation.name,
                static_cast<long long>(after.ours - before.ours), static_cast<long long>(after.of_cub - before.of_cub));
  }
  CHECK(LaunchesSoFar().ours > 100 && LaunchesSoFar().of_cub > 10);
}

TEST(AnArgumentThatIsGoneEndsTheProgram) {
  for (const bool is_gone : {false, true}) {
    const pid_t child = fork();
    if (child == 0) {
      if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(2);
      const sok::Cuda cuda;
      uint32_t* narrow = nullptr;
      uint64_t* wide = nullptr;
      SOK_CUDA(cudaMallocAsync(&narrow, 64, cuda.stream));
      SOK_CUDA(cudaMallocAsync(&wide, 128, cuda.stream));
      if (is_gone) SOK_CUDA(cudaFreeAsync(narrow, cuda.stream));
      sok::WidenKeys(cuda, narrow, true, 16, wide);
      _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQ(WIFSIGNALED(status), is_gone);
  }
}

TEST(ACallThatFailsIsToldOnceOrForGood) {
  for (const bool for_good : {false, true}) {
    int64_t calls = 0, told = 0;
    for (const Operation& operation : Operations()) {
      calls += ForAllCalls([&](int64_t k) {
        auto fixture = std::make_unique<Fixture>();
        sok_emulator::FailCall(k, cudaErrorIllegalAddress, for_good);
        const Told said = Run(operation, fixture.get());
        told += said != Told::kNothing;
        if (for_good) {
          const bool is_gone = cudaGetLastError() == cudaErrorIllegalAddress;
          if (is_gone) Check(Run(operation, fixture.get()) == Told::kOther, operation, k, "then nothing is told");
          fixture.reset();
          sok_emulator::EndFaults();
          return is_gone;
        }
        const bool has_failed = sok_emulator::EndFaults();
        Check(cudaGetLastError() == cudaSuccess, operation, k, "the error stays for the next call");
        return has_failed;
      });
    }
    CHECK(told > 200 && told > calls * 3 / 4);
  }
}
