// A tour with E2B's SDK for JavaScript, as it comes from npm: argv[2] is its folder. Prints `done` at the end.
import assert from 'node:assert/strict'
import { pathToFileURL } from 'node:url'

const e2b = await import(pathToFileURL(`${process.argv[2]}/dist/index.mjs`))
const { Sandbox, Template, FileType, CommandExitError, NotFoundError, TimeoutError, AuthenticationError, SandboxError } = e2b

async function until(found, what) {
  const deadline = Date.now() + 30_000
  while (!(await found())) {
    assert(Date.now() < deadline, what)
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}

const box = await Sandbox.create({ timeoutMs: 300_000, metadata: { tour: 'js' }, envs: { FROM_BOX: 'box' } })

// commands
const done = await box.commands.run('echo out; echo err >&2; pwd; id -un; echo $FROM_BOX $MORE', { envs: { MORE: 'more' } })
assert.deepEqual([done.stdout, done.stderr, done.exitCode], ['out\n/home/user\nuser\nbox more\n', 'err\n', 0])
await assert.rejects(box.commands.run('exit 7'), (error) => error instanceof CommandExitError && error.exitCode === 7)
await assert.rejects(box.commands.run('sleep 30', { timeoutMs: 1000 }), TimeoutError)
let said = ''
await box.commands.run('for n in 1 2 3; do echo $n; done', { onStdout: (data) => { said += data } })
assert.equal(said, '1\n2\n3\n')
const reader = await box.commands.run('while read -r line; do echo got $line; done', { background: true, stdin: true })
await box.commands.sendStdin(reader.pid, 'one\n')
await box.commands.closeStdin(reader.pid)
assert.equal((await reader.wait()).stdout, 'got one\n')
const beats = await box.commands.run('while :; do echo beat; sleep 0.1; done', { background: true })
await beats.disconnect()
let followed = ''
const again = await box.commands.connect(beats.pid, { onStdout: (data) => { followed += data } })
await until(() => followed.includes('beat'), 'it is followed')
assert((await box.commands.list()).some((one) => one.pid === beats.pid))
assert(await again.kill())
assert.equal(await box.commands.kill(beats.pid), false)

// a terminal
let shown = ''
const decoder = new TextDecoder()
const terminal = await box.pty.create({ cols: 90, rows: 30, onData: (data) => { shown += decoder.decode(data) } })
await box.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size\n'))
await until(() => shown.includes('30 90'), 'the terminal answers')
await box.pty.resize(terminal.pid, { cols: 100, rows: 40 })
await box.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size\n'))
await until(() => shown.includes('40 100'), 'the terminal has another size')
assert(await box.pty.kill(terminal.pid))

// files
const info = await box.files.write('notes.txt', 'one\n')
assert.equal(info.path, '/home/user/notes.txt')
assert.equal(await box.files.read('notes.txt'), 'one\n')
await box.files.write([{ path: 'deep/a', data: 'a' }, { path: 'deep/b', data: 'b' }])
const large = new Uint8Array(9 << 20).fill(7)
await box.files.write('large', large.buffer)
assert.deepEqual(await box.files.read('large', { format: 'bytes' }), large)
assert.deepEqual((await box.files.list('deep')).map((one) => one.name).sort(), ['a', 'b'])
assert.equal((await box.files.getInfo('notes.txt')).type, FileType.FILE)
assert.equal(await box.files.makeDir('made'), true)
assert.equal(await box.files.makeDir('made'), false)
assert.equal((await box.files.rename('notes.txt', 'made/moved')).path, '/home/user/made/moved')
assert.equal(await box.files.exists('notes.txt'), false)
const events = []
const watcher = await box.files.watchDir('made', (event) => events.push(`${event.type} ${event.name}`))
await box.files.write('made/new', 'x')
await until(() => events.includes('create new'), `of ${events}`)
await watcher.stop()
await box.files.remove('made')
await assert.rejects(box.files.read('gone'), NotFoundError)

// snapshots, forks, pauses
const kept = await box.createSnapshot()
await box.files.write('state', 'later')
const earlier = await Sandbox.create(kept.snapshotId)
assert.equal(await earlier.files.exists('state'), false)
await earlier.kill()
assert((await box.listSnapshots().nextItems()).some((one) => one.snapshotId === kept.snapshotId))
const [one, two] = await box.fork({ count: 2 })
await one.files.write('state', 'one')
assert.deepEqual([await one.files.read('state'), await two.files.read('state')], ['one', 'later'])
await Promise.all([one.kill(), two.kill()])
assert.equal(await box.pause(), true)
assert.equal(await box.isRunning(), false)
const same = await Sandbox.connect(box.sandboxId)
assert.equal(await same.files.read('state'), 'later')
assert.equal(await Sandbox.deleteSnapshot(kept.snapshotId), true)

// what there is, and what there is not
assert.deepEqual((await same.getInfo()).metadata, { tour: 'js' })
const found = await Sandbox.list({ query: { metadata: { tour: 'js' } } }).nextItems()
assert.deepEqual(found.map((item) => item.sandboxId), [box.sandboxId])
await same.setTimeout(600_000)
assert.equal((await same.getMetrics())[0].cpuCount, 2)
await assert.rejects(Sandbox.create({ apiKey: `e2b_${'0'.repeat(40)}` }), AuthenticationError)
await assert.rejects(Sandbox.create('gone'), SandboxError)
await assert.rejects(same.updateNetwork({ allowOut: ['example.org'], denyOut: ['0.0.0.0/0'] }), SandboxError)
const fenced = await Sandbox.create({ network: { allowOut: ['example.org'], denyOut: ['0.0.0.0/0'] } })
await fenced.updateNetwork({ allowOut: ['*.example.org'], denyOut: ['0.0.0.0/0'] })
assert.deepEqual((await fenced.getInfo()).network.allowOut, ['*.example.org'])
await fenced.kill()
await Template.build(Template().fromBaseImage().runCmd('echo js > made'), 'from-js')
const built = await Sandbox.create('from-js')
assert.equal(await built.files.read('made'), 'js\n')
await built.kill()
assert.equal(await same.kill(), true)
assert.equal(await same.kill(), false)
console.log('done')
process.exit(0)
