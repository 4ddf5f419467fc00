// Exchange of bytes between processes of one machine through memory that they share: one copy in, one meeting, one copy
// out. No arithmetic on what is moved.
//
// A gloo exchange among 8 processes on 2 cores sends 56 messages, each with its system calls; here a rank sleeps once.
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t kRanks = 8;
constexpr double kLook = 1.0;  // seconds between two looks at whether a peer still lives

struct alignas(64) Line {
  std::atomic<uint32_t> count;  // gate: arrivals of all ranks since the start; rank: meetings that it came to
  std::atomic<uint32_t> open;   // gate: meetings that are complete
  std::atomic<int32_t> pid;     // rank: its process
};

// At the start of the shared memory, which the system gives out as zeros. Two buffers a rank follow it.
struct Arena {
  Line gate;
  Line ranks[kRanks];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "atomics that lock do not work across processes");

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

void sleep_until_changed(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
  timespec t{time_t(seconds), long((seconds - double(time_t(seconds))) * 1e9)};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &t, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Also true of a process that ended and that its parent has not asked about yet, which a signal would still reach.
bool ended(int32_t pid) {
  const int process = int(syscall(SYS_pidfd_open, pid, 0));
  if (process < 0) return errno == ESRCH;
  pollfd look{process, POLLIN, 0};
  const bool gone = poll(&look, 1, 0) > 0;
  close(process);
  return gone;
}

// Bits 0 to 7: ranks that did not come to this meeting. Bits 8 to 15: those whose process is gone.
int64_t missing(Arena& arena, int64_t size, uint32_t meeting) {
  int64_t absent = 0, dead = 0;
  for (int64_t r = 0; r < size; ++r) {
    if (arena.ranks[r].count.load() == meeting) continue;
    absent |= int64_t(1) << r;
    if (ended(arena.ranks[r].pid.load())) dead |= int64_t(1) << r;
  }
  return absent | dead << kRanks;
}

// Returns 0 once all ranks came, or who is missing once one of them is dead or the time is over.
int64_t meet(Arena& arena, int64_t rank, int64_t size, double seconds) {
  const uint32_t meeting = arena.ranks[rank].count.load() + 1;
  arena.ranks[rank].count.store(meeting);
  if (arena.gate.count.fetch_add(1) + 1 == meeting * uint32_t(size)) {
    arena.gate.open.store(meeting);
    wake_all(arena.gate.open);
    return 0;
  }
  const double end = now() + seconds;
  for (uint32_t open; (open = arena.gate.open.load()) != meeting;) {
    const double left = end - now();
    sleep_until_changed(arena.gate.open, open, left < kLook ? (left > 0 ? left : 0) : kLook);
    if (arena.gate.open.load() == meeting) break;
    const int64_t who = missing(arena, size, meeting);
    if (who && (who >> kRanks || now() >= end)) return who;
  }
  return 0;
}

}  // namespace

extern "C" {

// Bytes at the start of the shared memory that are not buffers.
int64_t rlk_arena_header() { return sizeof(Arena); }

// Tells the peers which process a rank is, so that a dead one is not waited for.
void rlk_arena_join(void* memory, int64_t rank) { static_cast<Arena*>(memory)->ranks[rank].pid.store(getpid()); }

// Each rank receives `bytes` from every rank, in rank order, in `out`. With one piece, `mine` is `bytes` long and goes
// to all; with `size` pieces, piece i of `mine` goes to rank i. Returns 0, or who is missing, as `missing` says it.
//
// Two buffers of `room` bytes a rank, used in turn: nobody comes to the meeting after next, and so nobody writes a
// buffer again, before all have read it.
int64_t rlk_exchange(void* memory, int64_t rank, int64_t size, const char* mine, char* out, int64_t pieces,
                     int64_t bytes, int64_t room, double seconds) {
  Arena& arena = *static_cast<Arena*>(memory);
  char* buffers = static_cast<char*>(memory) + sizeof(Arena);
  const int64_t most = room / pieces;
  for (int64_t done = 0; done < bytes; done += most) {
    const int64_t n = bytes - done < most ? bytes - done : most;
    char* turn = buffers + (arena.ranks[rank].count.load() & 1 ? size * room : 0);
    for (int64_t p = 0; p < pieces; ++p) std::memcpy(turn + rank * room + p * n, mine + p * bytes + done, size_t(n));
    const int64_t who = meet(arena, rank, size, seconds);
    if (who) return who;
    const int64_t piece = pieces > 1 ? rank * n : 0;
    for (int64_t r = 0; r < size; ++r) std::memcpy(out + r * bytes + done, turn + r * room + piece, size_t(n));
  }
  return 0;
}

}  // extern "C"
