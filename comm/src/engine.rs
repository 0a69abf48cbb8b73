//! placeholder
#[derive(Debug)]
pub(crate) struct Ticket {}
impl Ticket {
    pub(crate) fn wait(&self) -> crate::Result<()> { Ok(()) }
    pub(crate) fn is_done(&self) -> bool { true }
}
