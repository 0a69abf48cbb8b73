//! Reasons why two ranks do not share memory.

use std::fmt;

/// Why two ranks do not share memory. Ranks send it to each other as a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Obstacle {
    Unwanted = 1,
    Unsupported,
    OtherHost,
    Unreachable,
    OtherUser,
    NotHandedOver,
    Unknown,
}

impl Obstacle {
    /// Encodes a reason as a byte; 0 stands for `None`.
    pub(crate) fn to_byte(obstacle: Option<Self>) -> u8 {
        obstacle.map_or(0, |obstacle| obstacle as u8)
    }

    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        use Obstacle::{NotHandedOver, OtherHost, OtherUser, Unknown, Unreachable, Unsupported, Unwanted};
        let known = [Unwanted, Unsupported, OtherHost, Unreachable, OtherUser, NotHandedOver];
        if byte == 0 { None } else { Some(known.into_iter().find(|o| *o as u8 == byte).unwrap_or(Unknown)) }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Obstacle::Unwanted => "one of the two was told to use TCP",
            Obstacle::Unsupported => "the system of one of the two does not offer it",
            Obstacle::OtherHost => "they run on different hosts, or under different kernels",
            Obstacle::Unreachable => {
                "their unix sockets do not reach each other (containers with networks of their own?)"
            }
            Obstacle::OtherUser => "they run as different users",
            Obstacle::NotHandedOver => "the memory could not be handed over (too many open files?)",
            Obstacle::Unknown => "the other rank gave a reason that this version does not know",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_survive_the_way() {
        for byte in 0..=7 {
            assert_eq!(Obstacle::to_byte(Obstacle::from_byte(byte)), byte);
        }
        assert_eq!(Obstacle::from_byte(200), Some(Obstacle::Unknown));
    }
}
