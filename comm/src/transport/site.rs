//! Machine, network and user of a rank, which decide whether two ranks can share memory. Ranks exchange them during
//! rendezvous, so that all know which pairs share memory before any two of them are connected.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::connection::obstacle::Obstacle;
use crate::platform;

/// Machine, network and user of a rank, as far as they matter for sharing memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Site {
    /// Hash of the kernel's boot id: two ranks with the same one run on the same machine, whatever its host name. `None`
    /// where unknown.
    boot: Option<u64>,
    /// Network in which unix sockets reach each other; 0 where unknown.
    network: u64,
    user: u32,
    /// Why this rank shares memory with no other ([`Obstacle`] as a byte); 0 where it can.
    obstacle: u8,
}

/// Returns a hash of the kernel's boot id: the same for all ranks of this machine, and for no others.
fn boot() -> Option<u64> {
    let hash = Sha256::digest(platform::boot_id()?);
    hash.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

impl Site {
    /// Returns the site of this process; `obstacle` is why it cannot or must not share memory.
    pub(crate) fn own(obstacle: Option<Obstacle>) -> Self {
        let (boot, network) = (boot(), platform::network());
        let missing = boot.is_none().then_some(Obstacle::Unsupported);
        let obstacle = Obstacle::to_byte(obstacle.or(missing));
        Self { boot, network, user: rustix::process::geteuid().as_raw(), obstacle }
    }

    /// Returns whether both ranks are known to run on the same machine.
    pub(crate) fn is_same_machine(&self, other: &Self) -> bool {
        self.boot.is_some() && self.boot == other.boot
    }

    /// Returns whether two ranks reach each other without leaving their machine, over loopback if not through shared
    /// memory. Containers with networks of their own count as separate hosts.
    pub(crate) fn is_same_network(&self, other: &Self) -> bool {
        self.is_same_machine(other) && self.network == other.network
    }

    /// Returns what keeps two ranks from sharing memory, as far as that is known without trying; the same from both
    /// sides.
    pub(crate) fn obstacle_to(&self, other: &Self) -> Option<Obstacle> {
        // Where both have a reason, both sides choose the same one.
        let reasons = [self.obstacle, other.obstacle].into_iter().filter(|reason| *reason != 0);
        let unwilling = reasons.min().and_then(Obstacle::from_byte);
        let separate = match () {
            () if !self.is_same_machine(other) => Some(Obstacle::OtherHost),
            () if self.network != other.network => Some(Obstacle::Unreachable),
            () if self.user != other.user => Some(Obstacle::OtherUser),
            () => None,
        };
        unwilling.or(separate)
    }
}

#[cfg(test)]
impl Site {
    /// A site whose serialized form is as long as any.
    pub(crate) fn longest() -> Self {
        Self { boot: Some(u64::MAX), network: u64::MAX, user: u32::MAX, obstacle: u8::MAX }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SITE: Site = Site { boot: Some(1), network: 2, user: 3, obstacle: 0 };

    #[test]
    fn one_machine_network_and_user_share() {
        assert_eq!(SITE.obstacle_to(&SITE), None);
        for (other, obstacle) in [
            (Site { boot: Some(2), ..SITE }, Obstacle::OtherHost),
            (Site { boot: None, ..SITE }, Obstacle::OtherHost),
            (Site { network: 3, ..SITE }, Obstacle::Unreachable),
            (Site { user: 4, ..SITE }, Obstacle::OtherUser),
            (Site { obstacle: Obstacle::to_byte(Some(Obstacle::Unwanted)), ..SITE }, Obstacle::Unwanted),
        ] {
            assert_eq!(SITE.obstacle_to(&other), Some(obstacle));
            assert_eq!(other.obstacle_to(&SITE), Some(obstacle));
        }
        let [one, other] = [Obstacle::Unwanted, Obstacle::OtherUser].map(|why| Obstacle::to_byte(Some(why)));
        let [one, other] = [one, other].map(|obstacle| Site { obstacle, ..SITE });
        assert_eq!(one.obstacle_to(&other), other.obstacle_to(&one));
        let unknown = Site { boot: None, ..SITE };
        assert!(SITE.is_same_machine(&SITE) && !unknown.is_same_machine(&unknown));
        let container = Site { network: 3, ..SITE };
        assert!(
            SITE.is_same_network(&Site { user: 4, ..SITE })
                && SITE.is_same_machine(&container)
                && !SITE.is_same_network(&container)
        );
    }
}
