// Happens-before: who touched which bytes last, and whether the next to touch them is ordered after.
//
// Two accesses of which one writes must be ordered by a stream, an event or a wait of the host; otherwise they race,
// whatever order the schedule of this run happened to choose. Memory that is mapped at several addresses is the same
// memory at each of them.
#include "driver.h"

#include <algorithm>
#include <unordered_set>

namespace sim {

Clock host_clock;

void Clock::join(const Clock &other) {
    if (done_.size() < other.done_.size()) done_.resize(other.done_.size());
    for (size_t i = 0; i < other.done_.size(); i++) done_[i] = std::max(done_[i], other.done_[i]);
}

void Clock::set(int stream, uint64_t sequence) {
    if (done_.size() <= (size_t)stream) done_.resize(stream + 1);
    done_[stream] = sequence;
}

bool Clock::covers(int stream, uint64_t sequence) const {
    return (size_t)stream < done_.size() && done_[stream] >= sequence;
}

namespace {

struct Touch {
    int stream = -1;
    uint64_t sequence = 0;
    const std::string *work = nullptr;
};

// Bytes with one history: who wrote them last, and who has read them since.
struct Segment {
    Address end;
    Touch writer;
    std::vector<Touch> readers;
};
std::map<Address, Segment> segments;  // by their first address; they do not overlap

const std::string *interned(const std::string &name) {
    static std::unordered_set<std::string> names;
    return &*names.insert(name).first;
}

void split_at(Address address) {
    auto next = segments.upper_bound(address);
    if (next == segments.begin()) return;
    auto &[begin, segment] = *std::prev(next);
    if (begin == address || segment.end <= address) return;
    Segment upper = segment;
    segment.end = address;
    segments.emplace(address, std::move(upper));
}

// Reports each pair of works once, however many segments they share.
class Report {
  public:
    Report(const SimAccess &access, const Touch &now, const Clock &clock) : access_(access), now_(now), clock_(clock) {}

    void check_all(Address begin, Address end) {
        split_at(begin);
        split_at(end);
        for (auto at = segments.lower_bound(begin); at != segments.end() && at->first < end; ++at)
            check(at->first, at->second);
    }

  private:
    void check(Address address, const Segment &segment) {
        compare(address, segment, segment.writer, "write");
        if (access_.write)
            for (const Touch &reader : segment.readers) compare(address, segment, reader, "read");
    }

    void compare(Address address, const Segment &segment, const Touch &before, const char *how) {
        if (!before.work || clock_.covers(before.stream, before.sequence)) return;
        if (!said_.insert({before.work, *how}).second) return;
        violation(
            "RACE on %s memory %#lx+%#lx: %s (%s) then %s (%s); stream %d work %lu is not ordered before stream %d "
            "work %lu",
            access_.reach == SIM_HOST ? "host" : "device", address, segment.end - address, before.work->c_str(), how,
            now_.work->c_str(), access_.write ? "write" : "read", before.stream, before.sequence, now_.stream,
            now_.sequence);
    }

    const SimAccess &access_;
    const Touch &now_;
    const Clock &clock_;
    std::set<std::pair<const std::string *, char>> said_;
};

void wrote(Address begin, Address end, const Touch &now) {
    segments.erase(segments.lower_bound(begin), segments.lower_bound(end));
    segments.emplace(begin, Segment{end, now, {}});
}

void add_reader(Segment &segment, const Touch &now, const Clock &clock) {
    auto ordered = [&](const Touch &reader) { return clock.covers(reader.stream, reader.sequence); };
    auto &readers = segment.readers;
    readers.erase(std::remove_if(readers.begin(), readers.end(), ordered), readers.end());
    readers.push_back(now);
}

void read(Address begin, Address end, const Touch &now, const Clock &clock) {
    auto next = segments.lower_bound(begin);
    for (Address at = begin; at < end;) {
        if (next == segments.end() || next->first > at) {
            Address until = next == segments.end() ? end : std::min(end, next->first);
            next = segments.emplace_hint(next, at, Segment{until, {}, {}});
        }
        add_reader(next->second, now, clock);
        at = next->second.end;
        ++next;
    }
}

}  // namespace

void touch(const SimAccess &access, const std::string &work, int stream, uint64_t sequence, const Clock &clock) {
    if (!access.bytes) return;
    Address begin = access.address, end = begin + access.bytes;
    Touch now{stream, sequence, interned(work)};
    Report report(access, now, clock);
    report.check_all(begin, end);
    for (auto [first, last] : aliases(begin, end)) report.check_all(first, last);
    if (access.write) wrote(begin, end, now);
    else read(begin, end, now, clock);
}

// The host takes memory away (unmap, free, unregister): it must have waited for all that touched it.
void taken_by_host(Address address, size_t bytes, const char *call) {
    split_at(address);
    split_at(address + bytes);
    std::set<const std::string *> said;
    auto check = [&](const Touch &touch, const char *how) {
        if (!touch.work || host_clock.covers(touch.stream, touch.sequence) || !said.insert(touch.work).second) return;
        bool done = streams[touch.stream]->done >= touch.sequence;
        violation("%s of %#lx+%#lx while %s (%s) on stream %d (work %lu) %s", call, address, bytes, touch.work->c_str(),
                  how, touch.stream, touch.sequence,
                  done ? "has run but the host never waited for it" : "is still pending");
    };
    auto first = segments.lower_bound(address), last = segments.lower_bound(address + bytes);
    for (auto at = first; at != last; ++at) {
        check(at->second.writer, "write");
        for (const Touch &reader : at->second.readers) check(reader, "read");
    }
    segments.erase(first, last);
}

}  // namespace sim
