// kvtether
// Tells a KVTether proxy what opencode does with its sessions: which are subagents, what a session waits for, when it
// is compacted, when it ends, and which requests are one-offs. No text of a message goes along. Written and removed by
// `kvtether setup opencode`. Without a proxy nothing of it is felt.

const ONE_OFFS = new Set(["title", "summary", "compaction"])
const PATIENCE_MS = 2000

const quoted = (text) => `"${text.replace(/[^ -~]/g, "?").replace(/["\\]/g, "\\$&").slice(0, 200)}"`

export const KVTether = async () => {
  let url = process.env.KVTETHER_URL ?? ""
  let key = process.env.KVTETHER_API_KEY ?? ""
  let told = Promise.resolve()

  // One after the other, in the order in which it happened.
  const tell = (type, properties) => {
    told = told.then(async () => {
      if (!url) return
      try {
        await fetch(`${url}/kv/v1/hooks/opencode`, {
          method: "POST",
          headers: { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) },
          body: JSON.stringify({ type, properties }),
          signal: AbortSignal.timeout(PATIENCE_MS),
        })
      } catch {}
    })
    return told
  }

  return {
    config: async (config) => {
      const options = config.provider?.kvtether?.options ?? {}
      url = url || (options.baseURL ?? "").replace(/\/v1\/?$/, "")
      key = key || (options.apiKey ?? "")
    },
    event: async ({ event }) => {
      const { sessionID, info } = event.properties ?? {}
      switch (event.type) {
        case "session.created":
        case "session.deleted":
          return tell(event.type, { info: { id: info.id, parentID: info.parentID } })
        case "session.compacted":
        case "session.idle":
        case "permission.asked":
        case "permission.updated":
        case "permission.replied":
          return tell(event.type, { sessionID })
      }
    },
    "chat.headers": async ({ agent, provider, model }, output) => {
      if ((model?.providerID ?? provider?.info?.id) !== "kvtether") return
      const name = typeof agent === "string" ? agent : (agent?.name ?? "")
      const fields = name ? [`agent=${quoted(name)}`] : []
      if (ONE_OFFS.has(name)) fields.push("one_off")
      if (fields.length) output.headers["x-kv-lifecycle"] = fields.join(", ")
    },
    "tool.execute.before": async ({ tool, sessionID }) => {
      tell("tool.execute.before", { sessionID, tool })
    },
    "tool.execute.after": async ({ tool, sessionID }) => {
      tell("tool.execute.after", { sessionID, tool })
    },
    "experimental.session.compacting": async ({ sessionID }) => tell("session.compacting", { sessionID }),
  }
}
