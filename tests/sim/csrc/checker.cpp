#include "checker.h"

#include <algorithm>
#include <stdexcept>

namespace sim {

Checker& checker() {
  static auto* instance =
      new Checker;  // never destroyed: tensors may be freed after static destructors have run
  return *instance;
}

std::string describe(StreamKey s) {
  if (s == HOST) return "the host";
  return "sim:" + std::to_string(s.device) + " stream " + std::to_string(s.id);
}

void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, time] : other) {
    auto& mine = into[stream];
    mine = std::max(mine, time);
  }
}

namespace {
uint64_t at(const Clock& clock, StreamKey s) {
  auto found = clock.find(s);
  return found == clock.end() ? 0 : found->second;
}
bool overlap(uintptr_t a_low, uintptr_t a_high, uintptr_t b_low, uintptr_t b_high) {
  return a_low < b_high && b_low < a_high;
}
}  // namespace

// ---- memory

void Checker::allocated(const void* base, size_t bytes, StreamKey home) {
  std::lock_guard lock(mutex_);
  auto address = reinterpret_cast<uintptr_t>(base);
  blocks_[address] = Block{address, bytes, home, {}, {}, {}};
}

// A freed block goes back to the pool of its home stream and may be handed out at once to that
// stream's next operation. Whatever other streams did with it must be over by then, or have been
// announced by record_stream. Pinned memory is exempt: the host allocator keeps it until the copies
// that use it are done.
void Checker::freed(const void* base) {
  std::lock_guard lock(mutex_);
  auto found = blocks_.find(reinterpret_cast<uintptr_t>(base));
  if (found == blocks_.end()) return;
  Block& block = found->second;
  if (block.home != HOST) {
    Clock seen = clocks_[block.home];
    merge(seen, clocks_[HOST]);
    std::map<StreamKey, std::string> pending;
    for (const auto* accesses : {&block.reads, &block.writes})
      for (const auto& [range, access] : *accesses)
        if (range.stream != block.home && !block.recorded.count(range.stream) &&
            !ordered_before(range, access, seen))
          pending[range.stream] = access.op;
    for (const auto& [stream, op] : pending)
      hazards_.push_back("freed in use: " + std::to_string(block.bytes) + " bytes of " +
                         describe(block.home) + " were freed while " + op + " on " +
                         describe(stream) + " may still use them (no record_stream, no wait)");
  }
  blocks_.erase(found);
}

void Checker::used_on(const void* address, StreamKey s) {
  std::lock_guard lock(mutex_);
  if (auto* block = find(reinterpret_cast<uintptr_t>(address))) block->recorded.insert(s);
  if (s.device >= 0) ++counts_[s.device]["record_stream"];
}

bool Checker::is_pinned(const void* address) {
  std::lock_guard lock(mutex_);
  auto* block = find(reinterpret_cast<uintptr_t>(address));
  return block && block->home == HOST;
}

bool Checker::knows(const void* address) {
  std::lock_guard lock(mutex_);
  return find(reinterpret_cast<uintptr_t>(address)) != nullptr;
}

int Checker::device_of(const void* address) {
  std::lock_guard lock(mutex_);
  auto* block = find(reinterpret_cast<uintptr_t>(address));
  return block ? block->home.device : -1;
}

Checker::Block* Checker::find(uintptr_t address) {
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return nullptr;
  Block& block = std::prev(next)->second;
  return address < block.base + block.bytes ? &block : nullptr;
}

// ---- operations

// A new operation starts after all that its stream was given before and all that the host knows
// now.
void Checker::step(StreamKey s) {
  auto& clock = clocks_[s];
  if (s != HOST) merge(clock, clocks_[HOST]);
  ++clock[s];
}

void Checker::launch(StreamKey s, const std::string& op, const std::vector<Use>& uses) {
  std::lock_guard lock(mutex_);
  step(s);
  ++counts_[s.device][op];
  threads_[s.device].insert(std::this_thread::get_id());
  for (const auto& use : uses)
    if (auto* block = find(use.low)) access(*block, s, use, op);
}

void Checker::result(StreamKey s, const std::string& op, const Use& use) {
  std::lock_guard lock(mutex_);
  if (auto* block = find(use.low)) access(*block, s, use, op);
}

void Checker::host_access(const std::string& op, const std::vector<Use>& uses) {
  std::lock_guard lock(mutex_);
  step(HOST);
  for (const auto& use : uses)
    if (auto* block = find(use.low)) access(*block, HOST, use, op);
}

void Checker::access(Block& block, StreamKey s, const Use& use, const std::string& op) {
  if (use.high <= use.low) return;
  against(block.writes, block, s, use,
          use.write ? "unordered write after write" : "unordered read after write", op);
  if (use.write) against(block.reads, block, s, use, "unordered write after read", op);
  const Range range{s, use.low, use.high};
  const Access now{clocks_[s][s], op};
  if (!use.write) {
    block.reads[range] = now;
    return;
  }
  // What came before this write and is covered by it in full can conflict with nothing later on its
  // own.
  const Clock& clock = clocks_[s];
  for (auto* accesses : {&block.reads, &block.writes})
    std::erase_if(*accesses, [&](const auto& entry) {
      return entry.first.low >= use.low && entry.first.high <= use.high &&
             ordered_before(entry.first, entry.second, clock);
    });
  block.writes[range] = now;
}

bool Checker::ordered_before(const Range& range, const Access& access, const Clock& clock) const {
  return access.time <= at(clock, range.stream);
}

void Checker::against(const Accesses& earlier, const Block& block, StreamKey s, const Use& use,
                      const char* kind, const std::string& op) {
  const Clock& clock = clocks_[s];
  for (const auto& [range, access] : earlier) {
    if (range.stream == s || !overlap(range.low, range.high, use.low, use.high)) continue;
    if (ordered_before(range, access, clock)) continue;
    report(std::string(kind) + ": " + op + " on " + describe(s) + " against " + access.op + " on " +
           describe(range.stream) + ", bytes " +
           std::to_string(std::max(range.low, use.low) - block.base) + " to " +
           std::to_string(std::min(range.high, use.high) - block.base) + " of a block of " +
           std::to_string(block.bytes) + " bytes");
    return;  // one report per operand says enough
  }
}

void Checker::report(const std::string& text) {
  hazards_.push_back(text);
  if (raise_) throw std::runtime_error("sim: " + text);
}

// ---- order

Clock Checker::record(StreamKey s) {
  std::lock_guard lock(mutex_);
  step(s);
  return clocks_[s];
}

void Checker::wait(StreamKey s, const Clock& clock) {
  std::lock_guard lock(mutex_);
  merge(clocks_[s], clock);
}

void Checker::synchronize(const Clock& clock) { wait(HOST, clock); }

void Checker::synchronize(StreamKey s) {
  std::lock_guard lock(mutex_);
  merge(clocks_[HOST], clocks_[s]);
}

void Checker::synchronize_device(int device) {
  std::lock_guard lock(mutex_);
  Clock all;
  for (const auto& [stream, clock] : clocks_)
    if (stream.device == device) merge(all, clock);
  merge(clocks_[HOST], all);
}

bool Checker::complete(const Clock& clock) {
  std::lock_guard lock(mutex_);
  const Clock& host = clocks_[HOST];
  return std::all_of(clock.begin(), clock.end(),
                     [&](const auto& entry) { return entry.second <= at(host, entry.first); });
}

Clock Checker::clock_of(StreamKey s) {
  std::lock_guard lock(mutex_);
  return clocks_[s];
}

// ---- reports

std::vector<std::string> Checker::hazards(bool clear) {
  std::lock_guard lock(mutex_);
  auto found = hazards_;
  if (clear) hazards_.clear();
  return found;
}

std::map<std::string, int64_t> Checker::op_counts(int device) {
  std::lock_guard lock(mutex_);
  return counts_[device];
}

int64_t Checker::thread_count(int device) {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(threads_[device].size());
}

void Checker::forget_counts() {
  std::lock_guard lock(mutex_);
  counts_.clear();
  threads_.clear();
}

void Checker::raise_at_hazard(bool on) {
  std::lock_guard lock(mutex_);
  raise_ = on;
}

}  // namespace sim
