// The happens-before checker: vector clocks per stream, and what each block of memory was last used
// for.
//
// The simulated device runs every kernel at once, so values never show a missing wait. A real
// device runs each stream on its own. The checker therefore keeps the order that the program asked
// for - and only that order - and reports two uses of the same bytes, at least one of them a write,
// that no chain of waits puts in order.
//
// Vocabulary
//   stream   a queue of one device; its operations are ordered among themselves
//   HOST     the host, kept as one more stream: launching orders the host before the stream, never
//   the reverse clock    for each stream, how many of its operations are known to be complete block
//   one allocation: of a device, or pinned host memory
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace sim {

struct StreamKey {
  int device;
  int64_t id;
  auto operator<=>(const StreamKey&) const = default;
};
constexpr StreamKey HOST{-1, 0};
std::string describe(StreamKey);

using Clock = std::map<StreamKey, uint64_t>;
void merge(Clock& into, const Clock& other);

// Bytes [low, high) that an operation reads or writes, as absolute addresses.
struct Use {
  uintptr_t low, high;
  bool write;
};

class Checker {
 public:
  // ---- memory
  void allocated(const void* base, size_t bytes, StreamKey home);  // home HOST: pinned host memory
  void freed(const void* base);
  void used_on(const void* address, StreamKey);  // record_stream
  bool is_pinned(const void* address);
  bool knows(const void* address);
  int device_of(const void* address);  // -1: not device memory

  // ---- operations
  void launch(StreamKey, const std::string& op, const std::vector<Use>&);
  void result(StreamKey, const std::string& op,
              const Use&);  // memory that the last launch allocated and filled
  void host_access(const std::string& op, const std::vector<Use>&);

  // ---- order
  Clock record(StreamKey);
  void wait(StreamKey, const Clock&);
  void synchronize(const Clock&);
  void synchronize(StreamKey);
  void synchronize_device(int device);
  bool complete(const Clock&);  // known to the host to be complete
  Clock clock_of(StreamKey);

  // ---- reports
  std::vector<std::string> hazards(bool clear);
  std::map<std::string, int64_t> op_counts(int device);
  int64_t thread_count(int device);
  void forget_counts();
  void raise_at_hazard(bool);

 private:
  struct Access {
    uint64_t time;
    std::string op;
  };
  // Accesses of one block by (stream, byte range); a later access to the same range replaces the
  // earlier one.
  struct Range {
    StreamKey stream;
    uintptr_t low, high;
    auto operator<=>(const Range&) const = default;
  };
  using Accesses = std::map<Range, Access>;
  struct Block {
    uintptr_t base;
    size_t bytes;
    StreamKey home;
    Accesses reads, writes;
    std::set<StreamKey> recorded;
  };

  Block* find(uintptr_t address);
  void step(StreamKey);
  void access(Block&, StreamKey, const Use&, const std::string& op);
  void against(const Accesses&, const Block&, StreamKey, const Use&, const char* kind,
               const std::string& op);
  void report(const std::string& text);
  bool ordered_before(const Range&, const Access&, const Clock&) const;

  std::mutex mutex_;
  std::map<uintptr_t, Block> blocks_;
  std::map<StreamKey, Clock> clocks_;
  std::vector<std::string> hazards_;
  bool raise_ = false;
  std::map<int, std::map<std::string, int64_t>> counts_;
  std::map<int, std::set<std::thread::id>> threads_;
};

Checker& checker();

}  // namespace sim
