//! Who is dead: hosts whose renewal counter has stood still for a whole lease while this host watched.
//!
//! No time of another machine is compared with a time of this one, so a stepped clock rescues nobody; and a
//! host that has just started to watch waits a whole lease before it judges. Only where the driver knows for
//! certain that a process has ended (SQLite: all processes are on one machine) is nothing waited for.

use std::collections::HashMap;
use std::time::Duration;

use warp_domain::HostId;
use warp_store::HostSeen;

/// What was seen of the others. A host watches for itself; a command does where no host may be left to do it.
#[derive(Debug, Default)]
pub struct Watch {
    seen: HashMap<HostId, (i64, Duration)>,
}

impl Watch {
    /// Takes note of `hosts` at `boot`, an instant of the boot-time clock, and answers those to be rescued, with the
    /// counter that proves it. `me` is whoever watches, if it is a host.
    pub fn observe(&mut self, hosts: &[HostSeen], me: Option<HostId>, boot: Duration, lease: Duration) -> Vec<(HostId, i64)> {
        self.seen.retain(|id, _| hosts.iter().any(|host| host.host == *id));
        let mut dead = Vec::new();
        for host in hosts.iter().filter(|host| Some(host.host) != me) {
            let entry = self.seen.entry(host.host).or_insert((host.renewals, boot));
            if host.gone {
                dead.push((host.host, host.renewals));
            } else if entry.0 != host.renewals {
                *entry = (host.renewals, boot);
            } else if boot.saturating_sub(entry.1) >= lease {
                dead.push((host.host, host.renewals));
            }
        }
        dead
    }
}

#[cfg(test)]
mod tests {
    use warp_domain::UnixMillis;

    use super::*;

    fn host(id: i64, renewals: i64, renewed_at: i64) -> HostSeen {
        HostSeen {
            host: HostId(id),
            name: String::new(),
            renewals,
            started_at: UnixMillis(0),
            renewed_at: UnixMillis(renewed_at),
            running: 0,
            gone: false,
            paused: None,
        }
    }

    #[test]
    fn only_a_counter_that_stood_still_for_a_lease_is_rescued() {
        let (me, lease, s) = (Some(HostId(1)), Duration::from_secs(15), Duration::from_secs);
        let mut watch = Watch::default();
        // Its wall clock is a year behind: no reason to rescue it.
        assert_eq!(watch.observe(&[host(1, 0, 0), host(2, 7, -31_536_000_000)], me, s(100), lease), []);
        assert_eq!(watch.observe(&[host(2, 8, 0)], me, s(110), lease), []);
        assert_eq!(watch.observe(&[host(2, 8, 0)], me, s(124), lease), [], "14 s after the last change");
        assert_eq!(watch.observe(&[host(2, 8, 0)], me, s(125), lease), [(HostId(2), 8)]);
        assert_eq!(watch.observe(&[host(2, 9, 0)], me, s(126), lease), [], "it lives");
        assert_eq!(watch.observe(&[], me, s(127), lease), []);
        assert_eq!(watch.observe(&[host(2, 9, 0)], me, s(200), lease), [], "seen anew, watched anew");
        let ended = HostSeen { gone: true, ..host(3, 0, 0) };
        assert_eq!(watch.observe(&[ended], me, s(200), lease), [(HostId(3), 0)], "certainly ended: at once");
    }
}
