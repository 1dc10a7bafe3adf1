// The emulator does what a device does, as far as our kernels rely on it.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "detail/launch.h"
#include "detail/primitives.h"
#include "detail/scratch.h"
#include "detail/upload.h"
#include "device_memory.h"
#include "sok/error.h"

namespace {

__global__ void ReverseKernel(int* values) {  // [blocks, threads]
  __shared__ int shared[256];
  shared[threadIdx.x] = values[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  values[blockIdx.x * blockDim.x + threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

__global__ void StoreKernel(int* values, unsigned places) {
  values[threadIdx.x % places] = static_cast<int>(threadIdx.x);
}

template <int kLanes>
__global__ void TileKernel(int* out) {  // [threads, 3]
  const sok::Tile<kLanes> tile;
  int sum = tile.lane + 1;
  for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(tile.mask, sum, step, kLanes);
  int* mine = out + 3 * threadIdx.x;
  mine[0] = sum;
  mine[1] = tile.Shuffle(static_cast<int>(threadIdx.x), kLanes - 1);
  mine[2] = static_cast<int>(tile.Ballot(tile.lane % 2 == 0));
}

__global__ void CountKernel(int64_t n, unsigned* count) {
  for (int64_t i = sok::GlobalThread(); i < n; i += sok::GlobalThreads()) atomicAdd(count, 1u);
}

__global__ void DynamicKernel(int* out) {
  SOK_DYNAMIC_SHARED(int, shared);
  if (threadIdx.x == 0) shared[7] = static_cast<int>(blockIdx.x) + 10;
  __syncthreads();
  if (threadIdx.x == 31) out[blockIdx.x] = shared[7];
}

// One thread of a block waits for another that comes later in it.
__global__ void HandOverKernel(unsigned* flag, unsigned* out) {
  if (threadIdx.x == 0) {
    while (sok::LoadRelaxed(flag) == 0) __nanosleep(100);
    __threadfence();
    out[0] = sok::LoadRelaxed(out + 1);
  } else {
    sok::StoreRelaxed(out + 1, 42u);
    __threadfence();
    atomicExch(flag, 1u);
  }
}

// Mistakes that a device does not report.
__global__ void MistakeKernel(int mistake, int* out) {
  const unsigned lane = threadIdx.x;
  if (mistake == 1) {  // the others never come to this barrier: they wait for lane 0
    if (lane == 0) {
      __syncthreads();
    } else {
      out[lane] = __shfl_sync(sok::kFullMask, 1, 0);
    }
  } else if (mistake == 2) {
    out[lane] = __shfl_sync(0xFFFFu << (lane & 16), 1, static_cast<int>(lane) ^ 16);
  } else if (mistake == 3) {
    if (lane != 5) __syncwarp();
  } else if (mistake == 4) {
    __syncwarp(1u << ((lane + 1) & 31));
  }
}

struct Named {  // pointers in a structure, as kernels get them
  int64_t n;
  int* values;
};

__global__ void AddOneKernel(Named named) {
  for (int64_t i = sok::GlobalThread(); i < named.n; i += sok::GlobalThreads()) named.values[i] += 1;
}
__global__ void AddOneToAllKernel(const Named* all, int64_t n) {
  for (int64_t i = 0; i < n; ++i) all[i].values[0] += 1;
}

// Mistakes of the host that a device answers with an error, a crash or nothing at all.
void MakeHostsMistake(int mistake, int* device) {  // [32]
  std::vector<int> host(32);
  if (mistake == 11) {
    std::printf("%d", device[3]);
  } else if (mistake == 12) {  // whatever a stream does meanwhile
    std::atomic<int> step{0};
    sok_emulator::Enqueue(nullptr, [&] {
      for (step = 1; step < 2;) std::this_thread::yield();
    });
    while (step < 1) std::this_thread::yield();
    device[3] = 1;
    step = 2;
  } else if (mistake == 13) {
    sok::Launch(MistakeKernel, 1, 32, 0, nullptr, 0, host.data());
  } else if (mistake == 14) {
    sok::Launch(AddOneKernel, 1, 32, 0, nullptr, Named{32, host.data()});
  } else if (mistake == 15) {
    const Named named{32, host.data()};
    DeviceArray<Named> all(1);
    sok::UploadTo({}, &named, 1, all.data());
  } else if (mistake == 16) {
    SOK_CUDA(cudaMemcpyAsync(host.data(), device, 4, cudaMemcpyHostToDevice, nullptr));
  } else if (mistake == 17) {
    SOK_CUDA(cudaMemcpyAsync(device + 1, host.data(), 128, cudaMemcpyHostToDevice, nullptr));
  } else if (mistake == 18) {
    SOK_CUDA(cudaMemsetAsync(host.data(), 0, 4, nullptr));
  } else if (mistake == 19) {  // 8,192 ints of 32
    sok::Launch(AddOneKernel, 1, 32, 0, nullptr, Named{8192, device});
  } else if (mistake == 20) {
    int* gone;
    SOK_CUDA(cudaMalloc(&gone, 4));
    SOK_CUDA(cudaFree(gone));
    sok::Launch(AddOneKernel, 1, 1, 0, nullptr, Named{1, gone});
  } else if (mistake == 21) {  // a device would take it; the emulator finds addresses in arguments and uploads alone
    const Named named{1, device};
    DeviceArray<Named> all(1);
    SOK_CUDA(cudaMemcpy(all.data(), &named, sizeof(named), cudaMemcpyHostToDevice));
    sok::Launch(AddOneToAllKernel, 1, 1, 0, nullptr, all.data(), int64_t{1});
    SOK_CUDA(cudaDeviceSynchronize());
  } else if (mistake == 22) {  // not in the first launch
    for (const unsigned places : {32u, 32u, 16u}) sok::Launch(StoreKernel, 1, 32, 0, nullptr, device, places);
    SOK_CUDA(cudaDeviceSynchronize());
  }
}

// This program again, making the mistake: what it says.
std::string SaidOf(int mistake) {
  const std::string command = "SOK_EMULATOR_MISTAKE=" + std::to_string(mistake) + " /proc/" + std::to_string(getpid()) +
                              "/exe test_emulator 2>&1";
  std::string said;
  FILE* pipe = popen(command.c_str(), "r");
  for (char text[256]; std::fgets(text, sizeof(text), pipe) != nullptr;) said += text;
  CHECK(pclose(pipe) != 0);
  return said;
}

#define CHECK_SAID(mistake, sentence) CHECK(SaidOf(mistake).find(sentence) != std::string::npos)

template <int kLanes>
void CheckTile() {
  DeviceArray<int> out(3 * 64);
  sok::Launch(TileKernel<kLanes>, 1, 64, 0, nullptr, out.data());
  const std::vector<int> got = out.Get();
  for (int t = 0; t < 64; ++t) {
    CHECK_EQ(got[static_cast<size_t>(3 * t)], kLanes * (kLanes + 1) / 2);
    CHECK_EQ(got[static_cast<size_t>(3 * t + 1)], t / kLanes * kLanes + kLanes - 1);
    unsigned even = 0;
    for (int l = 0; l < kLanes; l += 2) even |= 1u << l;
    CHECK_EQ(static_cast<unsigned>(got[static_cast<size_t>(3 * t + 2)]), even);
  }
}

}  // namespace

TEST(MistakesEndTheProgramWithASentence) {
  if (const char* mistake = std::getenv("SOK_EMULATOR_MISTAKE")) {
    DeviceArray<int> out(32);
    if (const int number = std::atoi(mistake); number > 10) {
      MakeHostsMistake(number, out.data());
    } else {
      sok::Launch(MistakeKernel, 1, 32, 0, nullptr, number, out.data());
    }
    out.Get();
    std::exit(0);
  }
  CHECK(SaidOf(1).find("deadlock: no thread of the block can go on") != std::string::npos);
  CHECK(SaidOf(2).find("a shuffle reads from a lane outside its mask") != std::string::npos);
  // It depends on the order of the threads which of the two is seen first.
  const std::string ended = SaidOf(3);
  CHECK(ended.find("a warp function waits for a lane that has ended") != std::string::npos ||
        ended.find("deadlock") != std::string::npos);
  CHECK(SaidOf(4).find("whose mask does not name the lane that calls it") != std::string::npos);
}

#if !defined(__SANITIZE_THREAD__)  // to which this is the race that it is
__global__ void CountCarelesslyKernel(int* count) {
  for (int i = 0; i < 50; ++i) *count = *count + 1;
}

TEST(ThreadsGiveWayAtLoadsAndStoresWhereThatIsAskedFor) {
  DeviceArray<int> count(std::vector<int>{0});
  sok::Launch(CountCarelesslyKernel, 1, 64, 0, nullptr, count.data());
#if defined(SOK_EMULATOR_YIELDS)
  CHECK(count.Get()[0] < 64 * 50);
#else
  CHECK_EQ(count.Get()[0], 64 * 50);
#endif
}
#endif

TEST(MemoryOfTheWrongSideEndsTheProgramWithASentence) {
  CHECK_SAID(13, "argument 2 has, at byte 0, the address of memory of the host that is not pinned");
  CHECK_SAID(13, "test_emulator.cc:");
#if !defined(__clang__)  // where anything may lie between the members of a structure
  CHECK_SAID(14, "argument 1 has, at byte 8, the address of memory of the host that is not pinned");
  CHECK_SAID(15, "an uploaded array has, at byte 8, the address of memory of the host that is not pinned");
#endif
  CHECK_SAID(16, "cudaMemcpyAsync(cudaMemcpyHostToDevice): `to` = 0x");
  CHECK_SAID(16, "is memory of the host");
  CHECK_SAID(17, "128 bytes at 0x");
  CHECK_SAID(17, "reach past an allocation of 128 bytes");
  CHECK_SAID(18, "cudaMemsetAsync: 0x");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // tests/cuda/emulator/memory.h
  CHECK_SAID(11, "the host touched device memory");
  CHECK_SAID(11, "12 bytes into an allocation of 128");
  CHECK_SAID(12, "the host touched device memory");
  CHECK_SAID(19, "touched device memory that is not allocated");
  CHECK_SAID(20, "or that was free by then");
  CHECK_SAID(21, "by an address that was no argument of its launch");
#endif
}

#if defined(__SANITIZE_THREAD__)
TEST(ARaceOfTwoThreadsOfABlockIsSeen) { CHECK_SAID(22, "ThreadSanitizer: data race"); }
#endif

TEST(KernelsReachDeviceMemoryAndPinnedMemory) {
  DeviceArray<int> device(std::vector<int>{1, 2, 3});
  int* pinned;
  SOK_CUDA(cudaHostAlloc(&pinned, 8, cudaHostAllocDefault));
  pinned[0] = pinned[1] = 10;
  sok::Launch(AddOneKernel, 1, 32, 0, nullptr, Named{1, device.data() + 1});
  sok::Launch(AddOneKernel, 1, 32, 0, nullptr, Named{2, pinned});
  DeviceArray<Named> all(600);  // more than one launch of UploadTo takes
  const std::vector<Named> named(600, Named{1, device.data() + 2});
  sok::UploadTo({}, named.data(), all.size(), all.data());
  sok::Launch(AddOneToAllKernel, 1, 1, 0, nullptr, all.data(), all.size());
  CHECK(device.Get() == (std::vector<int>{1, 3, 603}));
  CHECK_EQ(pinned[1], 11);
  SOK_CUDA(cudaFreeHost(pinned));
}

TEST(ABarrierIsPassedByAllThreadsTogether) {
  std::vector<int> values(7 * 256);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int>(i);
  DeviceArray<int> device(values);
  sok::Launch(ReverseKernel, 7, 256, 0, nullptr, device.data());
  const std::vector<int> got = device.Get();
  for (size_t i = 0; i < values.size(); ++i) CHECK_EQ(got[i], static_cast<int>(i / 256 * 256 + 255 - i % 256));
}

TEST(TilesOfAnyWidthTalkAmongThemselves) {
  CheckTile<1>();
  CheckTile<2>();
  CheckTile<8>();
  CheckTile<16>();
  CheckTile<32>();
}

TEST(AtomicsOfManyBlocksAddUp) {
  DeviceArray<unsigned> count(std::vector<unsigned>{0});
  sok::Launch(CountKernel, 9, 96, 0, nullptr, int64_t{5000}, count.data());
  CHECK_EQ(count.Get()[0], 5000u);
}

TEST(DynamicSharedMemoryBelongsToItsBlock) {
  DeviceArray<int> out(5);
  sok::Launch(DynamicKernel, 5, 32, 64, nullptr, out.data());
  for (int b = 0; b < 5; ++b) CHECK_EQ(out.Get()[static_cast<size_t>(b)], b + 10);
}

TEST(AThreadMayWaitForAnotherOfItsBlock) {
  DeviceArray<unsigned> flag(std::vector<unsigned>{0}), out(std::vector<unsigned>{0, 0});
  sok::Launch(HandOverKernel, 1, 2, 0, nullptr, flag.data(), out.data());
  CHECK_EQ(out.Get()[0], 42u);
}

TEST(AGridOfNoBlocksStartsNothing) { sok::Launch(ReverseKernel, 0, 256, 0, nullptr, nullptr); }

TEST(StreamsRunSideBySideUntilAnEventOrdersThem) {
  cudaStream_t a, b;
  SOK_CUDA(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
  SOK_CUDA(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  cudaEvent_t event;
  SOK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  std::atomic<bool> go{false};
  std::atomic<int> first{0}, order{0};
  sok_emulator::Enqueue(a, [&] {
    while (!go.load()) std::this_thread::yield();
    first = 1;
  });
  SOK_CUDA(cudaEventRecord(event, a));
  CHECK(cudaEventQuery(event) == cudaErrorNotReady);
  sok_emulator::Enqueue(b, [&] { go = true; });  // would never come if b waited for a
  SOK_CUDA(cudaStreamWaitEvent(b, event, 0));
  sok_emulator::Enqueue(b, [&] { order = first.load(); });
  SOK_CUDA(cudaStreamSynchronize(b));
  CHECK_EQ(order.load(), 1);
  SOK_CUDA(cudaEventDestroy(event));
  SOK_CUDA(cudaStreamDestroy(a));
  SOK_CUDA(cudaStreamDestroy(b));
}

TEST(MemoryHasAnEndAndErrorsNameTheLine) {
  sok_emulator::SetMemoryLimit(sok_emulator::MemoryInUse() + (1 << 20));
  CHECK_THROWS(DeviceArray<char>(2 << 20), sok::OutOfMemory, "cudaErrorMemoryAllocation");
  CHECK_THROWS(DeviceArray<char>(2 << 20), sok::OutOfMemory, "device_memory.h");
  DeviceArray<char> fits(1 << 19);
  sok_emulator::SetMemoryLimit(size_t{16} << 30);
  CHECK_THROWS(SOK_CUDA(cudaSetDevice(7)), sok::CudaError, "cudaSetDevice(7)");
}

TEST(ScratchIsOneBlockOnceItKnowsHowMuch) {
  const size_t before = sok_emulator::MemoryInUse();
  {
    sok::StreamScratch scratch{sok::Cuda{}};
    for (int round = 0; round < 3; ++round) {
      char* a = scratch.Get<char>(3 << 20);
      uint64_t* b = scratch.Get<uint64_t>(1 << 20);
      CHECK(reinterpret_cast<uintptr_t>(a) % 256 == 0 && reinterpret_cast<uintptr_t>(b) % 256 == 0);
      CHECK(reinterpret_cast<char*>(b) >= a + (3 << 20) || reinterpret_cast<char*>(b + (1 << 20)) <= a);
      SOK_CUDA(cudaMemsetAsync(b, 0, size_t{8} << 20, nullptr));
      scratch.Reset();
    }
  }
  SOK_CUDA(cudaDeviceSynchronize());
  CHECK_EQ(sok_emulator::MemoryInUse(), before);
}

TEST(PrimitivesScanAndSort) {
  const std::vector<uint32_t> keys = {5, 1, 5, 0, 1}, values = {0, 1, 2, 3, 4};
  DeviceArray<uint32_t> in(keys), payload(values), sorted(5), order(5);
  sok::StreamScratch scratch{sok::Cuda{}};
  sok::SortPairs({}, &scratch, in, payload, 5, 3, sorted, order);
  CHECK(sorted.Get() == (std::vector<uint32_t>{0, 1, 1, 5, 5}));
  CHECK(order.Get() == (std::vector<uint32_t>{3, 1, 4, 0, 2}));
  sok::ExclusiveSum({}, &scratch, in, in, 5);
  CHECK(in.Get() == (std::vector<uint32_t>{0, 5, 6, 11, 11}));
}
