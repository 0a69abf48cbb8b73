//! Pseudo-random calls, the same on all ranks with the same seed.

/// Pseudo-random numbers (SplitMix64).
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    pub(crate) fn of<'a, T: ?Sized>(&mut self, choices: &[&'a T]) -> &'a T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// Returns a random collective.
    pub(crate) fn collective(&mut self, world_size: usize) -> Vec<String> {
        let root = self.below(world_size as u64);
        let len = [1, 5, 1000, 300_000][self.below(4) as usize];
        let dtype = self.of(&["f32", "f32", "f16", "i64"]);
        let op = self.of(&["sum", "max"]);
        let text = match self.below(12) {
            0 => format!("all_reduce {dtype} {len} {op}"),
            1 => format!("reduce {dtype} {len} {op} {root}"),
            2 => format!("broadcast {dtype} {len} {root}"),
            3 => format!("all_gather {dtype} {len}"),
            4 => format!("reduce_scatter {dtype} {len} {op}"),
            5 => format!("gather {dtype} {len} {root}"),
            6 => format!("scatter {dtype} {len} {root}"),
            7 => format!("all_to_all {dtype} {len}"),
            8 => format!("coalesced {dtype} {len} {op}"),
            9 => format!("broadcasts {dtype} {len} {root}"),
            _ => "barrier".into(),
        };
        text.split(' ').map(String::from).collect()
    }

    /// Returns a random collective, or messages between all ranks.
    pub(crate) fn call(&mut self, world_size: usize) -> Vec<String> {
        let kind = self.below(7);
        if kind > 1 {
            return self.collective(world_size);
        }
        let len = [1, 1000, 300_000][self.below(3) as usize];
        vec![["ring", "relay"][kind as usize].into(), "f32".into(), len.to_string()]
    }
}

/// Returns the number of collectives among the first `count` calls of a seed.
pub(crate) fn collectives_among(seed: u64, count: usize, world_size: usize) -> usize {
    let mut dice = Dice(seed);
    (0..count).filter(|_| !matches!(dice.call(world_size)[0].as_str(), "ring" | "relay")).count()
}
