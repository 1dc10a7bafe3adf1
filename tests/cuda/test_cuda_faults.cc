// A call of CUDA's that fails, for every call of every operation of a table: what the caller is told, and what the table has then.
// Memory that is not to be had leaves it as it was, and usable. Any other error is told; and on a device that is gone for good,
// where all calls fail, nothing hangs, and what holds a table can let go of it.
#include <memory>
#include <string>

#include "check.h"
#include "fault_cases.h"

namespace {

void Check(bool is_so, const Operation& operation, int64_t k, const char* what) {
  if (!is_so) check::Fail(__FILE__, __LINE__, operation.name + (", call " + std::to_string(k) + ": ") + what);
}

}  // namespace

TEST(MemoryThatIsNotToBeHadLeavesTheTableAsItWas) {
  int64_t calls = 0;
  for (const Operation& operation : Operations()) {
    Fixture twin;
    const AllRows before = twin.Contents();
    operation.run(&twin);
    const AllRows after = twin.Contents();
    calls += ForAllCalls([&](int64_t k) {
      Fixture fixture;
      sok_emulator::FailCall(k, cudaErrorMemoryAllocation, /*for_good=*/true, /*of_allocations=*/true);
      const Told told = Run(operation, &fixture);
      const bool has_failed = sok_emulator::EndFaults();
      Check(has_failed == (told == Told::kMemory), operation, k, "the error was not told");
      Check(!has_failed || cudaGetLastError() == cudaSuccess, operation, k, "the error stays for the next call");
      if (!operation.has_parts) Check(fixture.Contents() == (has_failed ? before : after), operation, k, "other rows");
      if (has_failed) {
        Check(Run(operation, &fixture) == Told::kNothing, operation, k, "fails when it is done again");
        if (!operation.has_parts) Check(fixture.Contents() == after, operation, k, "other rows when it is done again");
      }
      return has_failed;
    });
  }
  CHECK(calls > 20);
}

TEST(MemoryThatIsThereTheSecondTimeIsNoError) {
  for (const Operation& operation : Operations()) {
    Fixture twin;
    operation.run(&twin);
    const AllRows after = twin.Contents();
    ForAllCalls([&](int64_t k) {
      Fixture fixture;
      sok_emulator::FailCall(k, cudaErrorMemoryAllocation, /*for_good=*/false, /*of_allocations=*/true);
      const Told told = Run(operation, &fixture);
      const bool has_failed = sok_emulator::EndFaults();
      if (told == Told::kNothing) Check(fixture.Contents() == after, operation, k, "other rows");
      return has_failed;
    });
  }
}

TEST(ACallThatFailsIsToldAndNothingHangs) {
  int64_t calls = 0, told = 0;
  for (const Operation& operation : Operations()) {
    Fixture twin;
    operation.run(&twin);
    const AllRows after = twin.Contents();
    calls += ForAllCalls([&](int64_t k) {
      Fixture fixture;
      sok_emulator::FailCall(k, cudaErrorIllegalAddress, /*for_good=*/false);
      const Told said = Run(operation, &fixture);
      const bool has_failed = sok_emulator::EndFaults();
      told += said != Told::kNothing;
      Check(cudaGetLastError() == cudaSuccess, operation, k, "the error stays for the next call");
      // Nothing that was asked for has failed: memory that goes back, or a wait before that.
      if (said == Told::kNothing) Check(fixture.Contents() == after, operation, k, "other rows");
      return has_failed;
    });
  }
  CHECK(told > 400 && told > calls * 3 / 4);
}

TEST(OfADeviceThatIsGoneEverythingIsToldAndLetGo) {
  for (const Operation& operation : Operations()) {
    ForAllCalls([&](int64_t k) {
      auto fixture = std::make_unique<Fixture>();
      sok_emulator::FailCall(k, cudaErrorIllegalAddress, /*for_good=*/true);
      Run(operation, fixture.get());
      const bool is_gone = cudaGetLastError() == cudaErrorIllegalAddress;
      if (is_gone) Check(Run(operation, fixture.get()) == Told::kOther, operation, k, "then nothing is told");
      fixture.reset();
      sok_emulator::EndFaults();
      return is_gone;
    });
  }
}
