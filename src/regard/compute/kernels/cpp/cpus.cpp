// How many CPUs this process may use. Containers limit time, not places: a quota of two CPUs on a
// machine of sixty-four makes sixty-four threads wait for each other. Both generations of control
// groups are read; whatever is not there or not a number sets no limit.
#include "cpus.hpp"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

namespace regard {
namespace {

// Two numbers of a group: microseconds of CPU time in each period. 0: no limit.
double share(const std::string& quota, const std::string& period) {
    char *quota_end, *period_end;
    const double allowed = std::strtod(quota.c_str(), &quota_end);  // "max" is no number
    const double every = std::strtod(period.c_str(), &period_end);
    if (quota_end == quota.c_str() || period_end == period.c_str()) return 0;
    return allowed > 0 && every > 0 ? allowed / every : 0;
}

double share_of_group(const std::string& folder, bool unified) {
    std::string quota, period;
    if (unified) {
        std::ifstream(folder + "/cpu.max") >> quota >> period;
    } else {
        std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
        std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    }
    return share(quota, period);
}

// The smallest share of a group and of those around it, up to where they are mounted. In a
// container the outer part of the name may not be there: what exists is looked at.
double smallest_share(const std::string& mounted, std::string group, bool unified) {
    double smallest = 0;
    for (;;) {
        while (!group.empty() && group.back() == '/') group.pop_back();
        const double own = share_of_group(mounted + group, unified);
        if (own > 0 && (smallest == 0 || own < smallest)) smallest = own;
        if (group.empty()) return smallest;
        const size_t last = group.rfind('/');
        group.erase(last == std::string::npos ? 0 : last);
    }
}

}  // namespace

int cpu_quota(const std::string& groups, const std::string& membership) {
    double smallest = 0;
    std::ifstream lines(membership);
    for (std::string line; std::getline(lines, line);) {
        // number:controllers:group, and no controllers where they are unified
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const std::string group = line.substr(second + 1);
        double own = 0;
        if (controllers.empty()) {
            own = smallest_share(groups, group, true);
        } else {
            std::istringstream names(controllers);
            for (std::string name; std::getline(names, name, ',');)
                if (name == "cpu") own = smallest_share(groups + "/" + controllers, group, false);
        }
        if (own > 0 && (smallest == 0 || own < smallest)) smallest = own;
    }
    if (smallest == 0) return 0;
    return int(std::min(smallest + 0.999, 1e6));
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
