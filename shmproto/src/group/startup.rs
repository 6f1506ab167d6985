//! Messages that start a member of a device group, over a socket between leader and member.
//!
//! ```text
//! leader                            member, a child process whose standard input is the socket
//!   Hello(description)   -------->    compares release and files, before it reads weights
//!                        <--------  Refused(reason), or Loading(progress) ..., then
//!                        <--------  Loaded(bytes), memory of its outputs
//!   Serve(precision), region ---->    maps the region and takes calls until the socket closes
//! ```

use super::layout::LAYOUT_HASH;
use crate::fd_passing::{Connection, FdMessage};
use crate::{wire_enum, wire_struct};

/// Leader's end of the socket.
pub type LeaderEnd = Connection<ToMember, FromMember>;

/// Member's end of the socket.
pub type MemberEnd = Connection<FromMember, ToMember>;

wire_enum! {
    /// Message from the leader to a member.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum ToMember {
        /// First message: what the member loads.
        Hello(MemberHello) = 0,
        /// Start of service, with the descriptor of the group's region.
        Serve(ServeGroup) = 1,
    }
}

wire_enum! {
    /// Message from a member to the leader.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum FromMember {
        /// The member does not take part; the text says why and what to do. The process ends.
        Refused(String) = 0,
        /// Progress of a member that loads its weights.
        Loading(GroupLoading) = 1,
        /// The member's weights are in memory; with the descriptor of its outputs.
        Loaded(MemberLoaded) = 2,
    }
}

wire_struct! {
    /// Description of a member: its part of the weights and its cores.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct MemberHello {
        /// [`LAYOUT_HASH`] of the leader.
        pub layout_hash: u64,
        /// Release of the leader's program.
        pub release: String,
        /// Index of the member's device among all devices; the leader's is 0.
        pub device: u32,
        /// Number of devices of the group.
        pub devices: u32,
        /// Division of the weights, by its code.
        pub split: u8,
        /// Absolute path of the base model.
        pub model: String,
        /// Seed of random weights instead of read ones.
        pub random_weights: Option<u64>,
        /// Hash of names, sizes and times of the model's files, as the leader opened them.
        pub files: [u8; 32],
        /// Cores of the member.
        pub cores: Vec<u32>,
        /// Maximum memory of the member's weights in bytes.
        pub memory_bytes: u64,
        /// Maximum number of rows of a pass, which gives the geometry.
        pub pass_rows: u32,
    }
}

wire_struct! {
    /// Progress of loading a member's weights.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct GroupLoading {
        /// Number of elements packed so far.
        pub done: u64,
        /// Number of elements that the member packs.
        pub total: u64,
    }
}

wire_struct! {
    /// Weights of a member.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct MemberLoaded {
        /// Bytes of its packed weights.
        pub weight_bytes: u64,
    }
}

wire_struct! {
    /// Start of a member's service.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ServeGroup {
        /// Arithmetic of linear layers, by its code.
        pub precision: u8,
    }
}

impl FdMessage for ToMember {
    fn descriptors(&self) -> usize {
        match self {
            Self::Hello(_) => 0,
            Self::Serve(_) => 1,
        }
    }

    fn text_bytes(&self) -> usize {
        match self {
            Self::Hello(hello) => hello.model.len().max(hello.release.len()),
            Self::Serve(_) => 0,
        }
    }
}

impl FdMessage for FromMember {
    fn descriptors(&self) -> usize {
        match self {
            Self::Refused(_) | Self::Loading(_) => 0,
            Self::Loaded(_) => 1,
        }
    }

    fn text_bytes(&self) -> usize {
        match self {
            Self::Refused(reason) => reason.len(),
            Self::Loading(_) | Self::Loaded(_) => 0,
        }
    }
}

/// Error of a member that must not join this leader's group; its text is sent to the leader.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemberError {
    /// The leader's program has another release or layout.
    #[error(
        "device {device} of the group runs release {member} and the leader release {leader}: restart the \
         executor, so that all its processes run one release"
    )]
    Release {
        /// Index of the member's device.
        device: u32,
        /// Release of the member's program.
        member: String,
        /// Release of the leader's program.
        leader: String,
    },
    /// The model's files are not those that the leader opened.
    #[error(
        "device {device} of the group finds other files at {model} than the leader; they were replaced \
         meanwhile: restart the executor when the files are complete"
    )]
    Files {
        /// Index of the member's device.
        device: u32,
        /// Path of the model.
        model: String,
    },
}

impl MemberHello {
    /// Checks the leader's release and layout, and the model's `files` as the member finds them.
    ///
    /// # Errors
    /// Returns the difference as an error, whose text is to be sent as [`FromMember::Refused`].
    pub fn check(&self, release: &str, files: &[u8; 32]) -> Result<(), MemberError> {
        let device = self.device;
        if self.layout_hash != LAYOUT_HASH || self.release != release {
            let (member, leader) = (release.to_owned(), self.release.clone());
            return Err(MemberError::Release { device, member, leader });
        }
        if self.files != *files {
            return Err(MemberError::Files { device, model: self.model.clone() });
        }
        Ok(())
    }
}
