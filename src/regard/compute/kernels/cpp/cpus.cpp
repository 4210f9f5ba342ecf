// How many CPUs this process may use. Containers limit time: with a quota of two CPUs, more threads
// wait for each other. Reads control groups v1 and v2; a missing file or a word sets no limit.
#include "cpus.hpp"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

namespace regard {
namespace {

// CPUs that a group may use: microseconds of CPU time in each period. INFINITY: no limit.
double share_of_group(const std::string& folder, bool unified) {
    std::string quota, period;
    if (unified) {
        std::ifstream(folder + "/cpu.max") >> quota >> period;
    } else {
        std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
        std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    }
    const double allowed = std::strtod(quota.c_str(), nullptr);  // 0 for "max" and other words
    const double every = std::strtod(period.c_str(), nullptr);
    return allowed > 0 && every > 0 ? std::min(allowed / every, 1e6) : INFINITY;
}

// The smallest share of a group and of those around it, of which a container may show only some.
double smallest_share(const std::string& mounted, std::string group, bool unified) {
    double smallest = INFINITY;
    for (;;) {
        while (!group.empty() && group.back() == '/') group.pop_back();
        smallest = std::min(smallest, share_of_group(mounted + group, unified));
        if (group.empty()) return smallest;
        const size_t last = group.rfind('/');
        group.erase(last == std::string::npos ? 0 : last);
    }
}

}  // namespace

int cpu_quota(const std::string& groups, const std::string& membership) {
    double smallest = INFINITY;
    std::ifstream lines(membership);
    for (std::string line; std::getline(lines, line);) {
        // number:controllers:group, and no controllers where they are unified
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const std::string group = line.substr(second + 1);
        if (controllers.empty()) smallest = std::min(smallest, smallest_share(groups, group, true));
        std::istringstream names(controllers);
        for (std::string name; std::getline(names, name, ',');)
            if (name == "cpu")
                smallest = std::min(smallest,
                                    smallest_share(groups + "/" + controllers, group, false));
    }
    return std::isinf(smallest) ? 0 : int(std::min(smallest + 0.999, 1e6));
}

int usable_cpus() {
    int cpus = 1;
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = CPU_COUNT(&set);
#else
    cpus = int(std::thread::hardware_concurrency());
#endif
    static const int limit = cpu_quota("/sys/fs/cgroup", "/proc/self/cgroup");
    if (limit) cpus = std::min(limit, cpus);
    return std::max(cpus, 1);
}

}  // namespace regard
