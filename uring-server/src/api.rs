//! The OpenAI-compatible surface as pure functions: body bytes in, typed requests out; tokens and text in, response
//! JSON out. No sockets, no clock, no threads: whoever calls owns them.

mod draft;
pub mod error;
pub mod escape;
mod fields;
pub mod json;
pub mod messages;
mod meter;
pub mod request;
pub mod response;
mod rewrite;
pub mod route;
pub mod template;
pub mod tokens;
