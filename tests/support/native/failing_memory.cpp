// An allocator, loaded before all others, whose n-th allocation for one library fails: what is
// asked for by code of that library itself, not by what it calls. See test_fused_allocations.py.
#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<long> left{-1};  // allocations until one fails; below 0: none will
std::atomic<long> failed{0};
std::uintptr_t low = 0, high = 0;

bool fails(const void* caller) {
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(caller);
    if (at < low || at >= high || left.load() < 0 || left-- != 0) return false;
    failed++;
    return true;
}

template <class F> F* original(const char* name) {
    return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

int find(dl_phdr_info* library, size_t, void* name) {
    if (!std::strstr(library->dlpi_name, static_cast<const char*>(name))) return 0;
    for (int n = 0; n < library->dlpi_phnum; n++) {
        const auto& part = library->dlpi_phdr[n];
        if (part.p_type != PT_LOAD || !(part.p_flags & PF_X)) continue;
        low = library->dlpi_addr + part.p_vaddr;
        high = low + part.p_memsz;
    }
    return 1;
}

}  // namespace

extern "C" {

// Whether the library is there. From now on its allocation number n, counted from 0, fails.
int fail_at(const char* library, long n) {
    left = -1;
    failed = 0;
    const int found = dl_iterate_phdr(find, const_cast<char*>(library));
    left = n;
    return found;
}

// Whether an allocation has failed since; none fails any more.
long end_failing() {
    left = -1;
    return failed;
}

void* malloc(size_t size) {
    static auto* const real = original<void*(size_t)>("malloc");
    return fails(__builtin_return_address(0)) ? nullptr : real(size);
}

void* aligned_alloc(size_t alignment, size_t size) {
    static auto* const real = original<void*(size_t, size_t)>("aligned_alloc");
    return fails(__builtin_return_address(0)) ? nullptr : real(alignment, size);
}

void* realloc(void* block, size_t size) {
    static auto* const real = original<void*(void*, size_t)>("realloc");
    return fails(__builtin_return_address(0)) ? nullptr : real(block, size);
}
}

void* operator new(size_t size) {
    static auto* const real = original<void*(size_t)>("_Znwm");
    if (fails(__builtin_return_address(0))) throw std::bad_alloc();
    return real(size);
}
