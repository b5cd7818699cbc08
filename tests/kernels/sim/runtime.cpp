// Runs a block of CUDA threads as fibers on one OS thread, and finds what a GPU would leave to luck.
//
// A thread is a fiber with a stack of its own. A warp runs until all its lanes wait at a barrier or have ended, then the
// next one does; the order (forward, reverse, random) is the launch's, and results must not depend on it. A warp
// collective is a rendezvous: lanes post their arguments and the last one carries the operation out for all, so that
// masks, divergence and ended lanes are checked on the way. Shared memory is poisoned before each block and ends at a
// guard page; ldmatrix counts its bank conflicts. Faults (ours, and SIGSEGV and the like inside a kernel) end the launch
// with a sentence, never the process.
#include "cusim.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <mutex>
#include <vector>

namespace cusim {
Position position;

namespace {
constexpr size_t PAGE = 4096, STACK = 128 * 1024, MAX_THREADS = 1024;
constexpr size_t SHARED_LIMIT = 227 * 1024;

enum State : uint8_t { READY, AT_COLLECTIVE, AT_BARRIER, ENDED };
struct Copy {
    void* dst;
    const void* src;  // null: zeros
};
struct Thread {
    void* stack_pointer;
    uint3 index;
    unsigned linear, lane;
    State state;
    const char* site;  // the operation it waits at, or was last at
    uint32_t mask;
    void* arguments;
    int predicate;
    std::vector<Copy> copies;     // lazy: not landed yet
    std::vector<size_t> groups;   // ends of committed groups in `copies`
};

struct Engine {
    const Launch* launch = nullptr;
    void (*entry)(void*);
    void* closure;
    Thread* threads = nullptr;
    Thread* current = nullptr;
    unsigned num_threads, live;
    void* scheduler_stack;
    char *shared_begin, *shared_end;    // of __shared__ variables
    char *dynamic_begin, *dynamic_end;  // of dynamic shared memory
    int reduced;
    bool failed;
    uint64_t random;
    char *stacks = nullptr, *dynamic_map = nullptr;
    size_t dynamic_map_bytes = 0;
} engine;
std::mutex one_launch;
alignas(16) char fault_stack[64 * 1024], signal_stack[64 * 1024];

// Saves the registers that a callee keeps, changes stacks, restores them.
extern "C" void cusim_switch(void** save, void* load);
#if defined(__x86_64__)
asm(".text\n.globl cusim_switch\n.hidden cusim_switch\n.type cusim_switch,@function\ncusim_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
constexpr int SAVED_WORDS = 6;
#elif defined(__aarch64__)
asm(".text\n.globl cusim_switch\n.hidden cusim_switch\n.type cusim_switch,%function\ncusim_switch:\n"
    "stp x19,x20,[sp,#-160]!\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\nstp x25,x26,[sp,#48]\n"
    "stp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\n"
    "stp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\nmov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
    "ldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\nldp x27,x28,[sp,#64]\n"
    "ldp x29,x30,[sp,#80]\nldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\nldp d12,d13,[sp,#128]\n"
    "ldp d14,d15,[sp,#144]\nldp x19,x20,[sp],#160\nret\n");
#else
#error "fibers are written for x86-64 and aarch64"
#endif

void yield() { cusim_switch(&engine.current->stack_pointer, engine.scheduler_stack); }

void resume(Thread& thread) {
    engine.current = &thread;
    position.thread = thread.index;
    cusim_switch(&engine.scheduler_stack, thread.stack_pointer);
}

// The first fault counts; the launch ends when control is back in the scheduler.
void report(const char* format, ...) {
    if (engine.failed) return;
    engine.failed = true;
    char* out = engine.launch->error;
    size_t left = engine.launch->error_size;
    int n = snprintf(out, left, "%s, block (%u, %u, %u)", engine.launch->kernel, position.block.x, position.block.y,
                     position.block.z);
    if (const Thread* t = engine.current; t != nullptr && n >= 0 && size_t(n) < left)
        n += snprintf(out + n, left - size_t(n), ", thread (%u, %u, %u) (warp %u, lane %u)%s%s", t->index.x, t->index.y,
                      t->index.z, t->linear / 32, t->lane, t->site ? ", last at " : "", t->site ? t->site : "");
    if (n >= 0 && size_t(n) < left) n += snprintf(out + n, left - size_t(n), ": ");
    va_list arguments;
    va_start(arguments, format);
    if (n >= 0 && size_t(n) < left) vsnprintf(out + n, left - size_t(n), format, arguments);
    va_end(arguments);
}

void release_barrier() {
    const char* site = nullptr;
    int all = 1, any = 0, count = 0;
    for (unsigned i = 0; i < engine.num_threads; i++) {
        Thread& t = engine.threads[i];
        if (t.state != AT_BARRIER) return;
        if (site != nullptr && t.site != site && strcmp(site, t.site) != 0) {
            report("threads of the block meet at different barriers: %s and %s", site, t.site);
            return;
        }
        site = t.site;
        all &= t.predicate != 0;
        any |= t.predicate != 0;
        count += t.predicate != 0;
    }
    engine.reduced = all | any << 1 | count << 2;
    for (unsigned i = 0; i < engine.num_threads; i++) engine.threads[i].state = READY;
}

void land(Thread& thread, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const Copy& copy = thread.copies[i];
        if (copy.src != nullptr) memcpy(copy.dst, copy.src, 16);
        else memset(copy.dst, 0, 16);
    }
    thread.copies.erase(thread.copies.begin(), thread.copies.begin() + ptrdiff_t(count));
}

void fiber_main() {
    engine.entry(engine.closure);
    Thread& me = *engine.current;
    if (!me.copies.empty()) fail("the thread ends with copies under way");
    me.state = ENDED;
    engine.live--;
    yield();
    __builtin_unreachable();
}

// ---- faults of the hardware

const char* fault_reason;
uintptr_t fault_address;

void fault_main() {
    *engine.launch->fault_address = fault_address;
    report("%s (address %#zx)", fault_reason, size_t(fault_address));
    yield();
    __builtin_unreachable();
}

void on_signal(int signal, siginfo_t* info, void* context) {
    if (engine.launch == nullptr || engine.current == nullptr) {  // not ours: let it end the process
        ::signal(signal, SIG_DFL);
        return;
    }
    fault_address = uintptr_t(info->si_addr);
    fault_reason = signal == SIGILL    ? "undefined behaviour (a trap of the sanitizer)"
                   : signal == SIGFPE  ? "integer division by zero"
                   : signal == SIGBUS  ? "misaligned or absent memory"
                   : info->si_code > 0 && info->si_code < 0x80 ? "access outside of an allocation"
                                                               : "misaligned access";
    auto* machine = &static_cast<ucontext_t*>(context)->uc_mcontext;
    const uintptr_t top = uintptr_t(fault_stack + sizeof fault_stack);
#if defined(__x86_64__)
    machine->gregs[REG_RSP] = greg_t(top - 8);
    machine->gregs[REG_RIP] = greg_t(uintptr_t(&fault_main));
#else
    machine->sp = top;
    machine->pc = uintptr_t(&fault_main);
#endif
}

class Signals {  // caught while a launch runs, then given back
    static constexpr int CAUGHT[4] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    struct sigaction before_[4];
    stack_t stack_before_;

  public:
    Signals() {
        stack_t stack = {};
        stack.ss_sp = signal_stack;
        stack.ss_size = sizeof signal_stack;
        sigaltstack(&stack, &stack_before_);
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < 4; i++) sigaction(CAUGHT[i], &action, &before_[i]);
    }
    ~Signals() {
        for (int i = 0; i < 4; i++) sigaction(CAUGHT[i], &before_[i], nullptr);
        sigaltstack(&stack_before_, nullptr);
    }
};

// ---- one block

// Memory that ends at a page which faults.
char* guarded_map(size_t bytes) {
    char* base = static_cast<char*>(
        mmap(nullptr, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    mprotect(base + bytes, PAGE, PROT_NONE);
    return base;
}

void allocate(size_t shared_bytes) {
    if (engine.threads == nullptr) engine.threads = new Thread[MAX_THREADS];
    if (engine.stacks == nullptr) {
        engine.stacks = guarded_map(MAX_THREADS * STACK);
        for (size_t i = 0; i < MAX_THREADS; i++) mprotect(engine.stacks + i * STACK, PAGE, PROT_NONE);
    }
    if (engine.dynamic_map == nullptr) {
        engine.dynamic_map_bytes = (SHARED_LIMIT + PAGE - 1) / PAGE * PAGE;
        engine.dynamic_map = guarded_map(engine.dynamic_map_bytes);
    }
    engine.dynamic_end = engine.dynamic_map + engine.dynamic_map_bytes;
    engine.dynamic_begin = engine.dynamic_end - (shared_bytes + 127) / 128 * 128;
}

void prepare(Thread& t, unsigned linear, const dim3& block) {
    t.linear = linear;
    t.lane = linear % 32;
    t.index = {linear % block.x, linear / block.x % block.y, linear / (block.x * block.y)};
    t.state = READY;
    t.site = nullptr;
    t.copies.clear();
    t.groups.clear();
    uintptr_t top = uintptr_t(engine.stacks + (linear + 1) * STACK) - t.lane * 64;  // lanes' frames in other cache sets
#if defined(__x86_64__)
    void** stack = reinterpret_cast<void**>(top);
    *--stack = nullptr;
    *--stack = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < SAVED_WORDS; i++) *--stack = nullptr;
#else
    void** stack = reinterpret_cast<void**>(top - 160);
    memset(stack, 0, 160);
    stack[11] = reinterpret_cast<void*>(&fiber_main);
#endif
    t.stack_pointer = stack;
}

unsigned random_below(unsigned n) {
    engine.random ^= engine.random << 13;
    engine.random ^= engine.random >> 7;
    engine.random ^= engine.random << 17;
    return unsigned(engine.random >> 33) % n;
}

// Runs a warp's lanes until none is ready; in random order it may stop earlier. Whether any ran.
bool run_warp(unsigned warp) {
    const unsigned first = warp * 32, lanes = engine.num_threads - first < 32 ? engine.num_threads - first : 32;
    const int order = engine.launch->order;
    bool ran = false;
    for (bool again = true; again;) {
        again = false;
        const unsigned turn = order == 2 ? random_below(lanes) : 0;
        for (unsigned i = 0; i < lanes; i++) {
            Thread& t = engine.threads[first + (order == 1 ? lanes - 1 - i : (i + turn) % lanes)];
            if (t.state != READY) continue;
            resume(t);
            if (engine.failed) return true;
            ran = again = true;
        }
        if (order == 2 && random_below(4) == 0) break;
    }
    return ran;
}

void report_deadlock() {
    char waiting[512];
    int n = 0, named = 0;
    const char* last = nullptr;
    for (unsigned i = 0; i < engine.num_threads && named < 4; i++) {
        const Thread& t = engine.threads[i];
        const char* site = t.state == ENDED ? "its end" : t.site ? t.site : "?";
        if (site == last) continue;
        last = site;
        n += snprintf(waiting + n, sizeof waiting - size_t(n), "%sthread %u at %s", named++ ? ", " : "", i, site);
        if (n < 0 || size_t(n) >= sizeof waiting) break;
    }
    engine.current = nullptr;
    report("deadlock: %s", waiting);
}

void run_block(uint3 block) {
    position.block = block;
    engine.live = engine.num_threads;
    memset(engine.dynamic_begin, 0xff, size_t(engine.dynamic_end - engine.dynamic_begin));  // NaN in every format
    if (engine.shared_begin != nullptr)
        memset(engine.shared_begin, 0xff, size_t(engine.shared_end - engine.shared_begin));
    for (unsigned i = 0; i < engine.num_threads; i++) prepare(engine.threads[i], i, engine.launch->block);
    const unsigned warps = (engine.num_threads + 31) / 32;
    while (engine.live > 0) {
        bool ran = false;
        const unsigned turn = engine.launch->order == 2 ? random_below(warps) : 0;
        for (unsigned i = 0; i < warps; i++) {
            ran |= run_warp(engine.launch->order == 1 ? warps - 1 - i : (i + turn) % warps);
            if (engine.failed) return;
        }
        if (!ran) return report_deadlock();
    }
}
}  // namespace

// ---- what kernels call

void fail(const char* why) {
    report("%s", why);
    yield();
    __builtin_unreachable();
}

void check_shared(const void* p, size_t bytes, size_t alignment, const char* operation) {
    const char* at = static_cast<const char*>(p);
    if (uintptr_t(p) % alignment != 0) {
        engine.current->site = operation;
        fail("address in shared memory not aligned");
    }
    const bool dynamic = at >= engine.dynamic_begin && at + bytes <= engine.dynamic_end;
    const bool fixed = at >= engine.shared_begin && at + bytes <= engine.shared_end;
    if (!dynamic && !fixed) {
        engine.current->site = operation;
        fail("address outside of the block's shared memory");
    }
}

void count_bank_conflicts(const void* const* rows) {
    unsigned taken = 0;  // of the eight groups of four banks
    for (int i = 0; i < 8; i++) taken |= 1u << (uintptr_t(rows[i]) / 16 % 8);
    *engine.launch->bank_conflicts += uint64_t(8 - __builtin_popcount(taken));
}

void* dynamic_shared() { return engine.dynamic_begin; }

void warp_collective(uint32_t mask, const char* name, WarpOperation operation, void* arguments) {
    Thread& me = *engine.current;
    me.site = name;
    if ((mask >> me.lane & 1) == 0) fail("the calling lane is not in its own mask");
    me.state = AT_COLLECTIVE;
    me.mask = mask;
    me.arguments = arguments;
    const unsigned first = me.linear / 32 * 32;
    void* lanes[32] = {};
    for (unsigned l = 0; l < 32; l++) {
        if ((mask >> l & 1) == 0) continue;
        if (first + l >= engine.num_threads) fail("a lane in the mask does not exist");
        const Thread& other = engine.threads[first + l];
        if (other.state == ENDED) fail("a lane in the mask has ended");
        if (other.state == AT_BARRIER) fail("a lane in the mask waits at a barrier of the block");
        if (other.state != AT_COLLECTIVE) return yield();  // not the last
        if (strcmp(other.site, name) != 0) fail("lanes of one mask meet at different operations");
        if (other.mask != mask) fail("lanes of one operation name different masks");
        lanes[l] = other.arguments;
    }
    if (operation != nullptr) operation(lanes, mask);
    for (unsigned l = 0; l < 32; l++)
        if (mask >> l & 1) engine.threads[first + l].state = READY;
}

void block_barrier(const char* site) { block_reduce(site, 1, 0); }

int block_reduce(const char* site, int predicate, int mode) {
    Thread& me = *engine.current;
    me.state = AT_BARRIER;
    me.site = site;
    me.predicate = predicate;
    release_barrier();
    yield();
    return mode == 0 ? engine.reduced & 1 : mode == 1 ? engine.reduced >> 1 & 1 : engine.reduced >> 2;
}

void copy_async16(void* dst, const void* src, bool valid) {
    check_shared(dst, 16, 16, "cp.async");
    if (uintptr_t(src) % 16 != 0) fail("cp.async reads from an address not aligned to 16 bytes");
    Thread& me = *engine.current;
    me.copies.push_back({dst, valid ? src : nullptr});
    if (engine.launch->eager) land(me, 1);
}

void copy_commit() { engine.current->groups.push_back(engine.current->copies.size()); }

void copy_wait(int groups) {
    Thread& me = *engine.current;
    if (me.groups.size() <= size_t(groups)) return;
    const size_t done = me.groups.size() - size_t(groups), end = me.groups[done - 1];
    land(me, end);
    me.groups.erase(me.groups.begin(), me.groups.begin() + ptrdiff_t(done));
    for (size_t& group : me.groups) group -= end;
}

int run(const Launch& launch, void (*entry)(void*), void* closure, char* shared_begin, char* shared_end) {
    const std::lock_guard<std::mutex> lock(one_launch);
    engine.launch = &launch;
    engine.entry = entry;
    engine.closure = closure;
    engine.current = nullptr;
    engine.failed = false;
    engine.shared_begin = shared_begin;
    engine.shared_end = shared_end;
    engine.random = launch.seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
    position.block = {0, 0, 0};
    position.block_dim = launch.block;
    position.grid_dim = launch.grid;
    engine.num_threads = launch.block.x * launch.block.y * launch.block.z;
    const size_t shared_bytes = launch.shared_bytes + size_t(shared_end - shared_begin);
    if (engine.num_threads == 0 || engine.num_threads > MAX_THREADS || shared_bytes > SHARED_LIMIT ||
        launch.grid.y > 65535 || launch.grid.z > 65535) {
        report("no device launches this: %u threads a block, %zu bytes of shared memory, grid (%u, %u, %u)",
               engine.num_threads, shared_bytes, launch.grid.x, launch.grid.y, launch.grid.z);
    } else {
        allocate(launch.shared_bytes);
        const Signals signals;
        for (unsigned z = 0; z < launch.grid.z && !engine.failed; z++)
            for (unsigned y = 0; y < launch.grid.y && !engine.failed; y++)
                for (unsigned x = 0; x < launch.grid.x && !engine.failed; x++) run_block({x, y, z});
    }
    const bool failed = engine.failed;
    engine.launch = nullptr;
    engine.current = nullptr;
    return failed;
}
}  // namespace cusim
