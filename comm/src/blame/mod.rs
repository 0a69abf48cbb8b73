//! Who is at fault: what ranks tell each other of what they do ([`control`]), the one cause that all of them report ([`verdict`]), and how
//! long a rank waits for another ([`patience`]).

pub(crate) mod causes;
pub(crate) mod control;
pub(crate) mod ending;
pub(crate) mod patience;
pub(crate) mod supervisor;
pub(crate) mod verdict;
